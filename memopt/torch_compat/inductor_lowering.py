"""How Inductor lowers operators of one's own: as calls, in place, over other values; tried on torch 2.11 and 2.13.

A value here is what Inductor has while it lowers a graph, a box around what will be stored or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import ir
from torch._inductor.dependencies import extract_read_writes
from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from memopt.torch_compat.patched import replaced


def lower_by(operator: Any, lower: Callable[..., Any]) -> None:
    """Have Inductor lower an operator so, from now on in this process.

    Args:
        operator: an overload.
        lower: takes values for the operator's arguments, and returns its result's.
    """
    register_lowering(operator, type_promotion_kind=None)(lower)


def lower_as_call(operator: Any) -> None:
    """Have Inductor call an operator as it is, with operands as they lie, from now on in this process."""
    lower_by(operator, fallback_handler(operator, add_to_fallback_set=False))  # type: ignore[no-untyped-call]


def writes_over(operator: Any, into: Any, argument: int) -> None:
    """Have Inductor use the form `into` of an operator, which writes over an argument, where nothing reads that later.

    Args:
        operator: an overload.
        into: the overload that stands for it.
        argument: position of the argument that is written over.
    """
    inplaceable_ops[operator] = InplaceableOp(into, argument)


def call(operator: Any, *arguments: Any) -> None:
    """Call an operator here that writes to arguments of its, and returns nothing."""
    ir.FallbackKernel.create(operator, *arguments)


def call_for(operator: Any, held: Any, device: Any) -> Any:
    """The value that an operator makes on a device of one that lies elsewhere, as its arguments are these two."""
    made: Any = ir.FallbackKernel.create(operator, held, device)
    # By its operand it would run where that lies: the code would leave the device's context for it, and enter it again.
    made.inputs[0].layout = ir.MultiOutputLayout(device=device)
    value: Any = ir.TensorBox.create(made)
    # Inductor knows nothing of where inputs on the host lie, and takes that over for what is made of them: this is new.
    V.graph.unaligned_buffers.discard(value.get_name())
    return value


def node_being_lowered() -> fx.Node:
    """The node of the graph that is lowered here."""
    node: fx.Node = V.graph.current_node
    return node


def is_stored(value: Any) -> bool:
    """Whether a value, which is realized, is a buffer that a kernel or a call of this graph makes."""
    return isinstance(value.data, ir.StorageBox) and isinstance(value.data.data, (ir.ExternKernel, ir.ComputedBuffer))


def is_to_be_computed(value: Any) -> bool:
    """Whether no kernel for it is decided on: what is one already may stand before what still reads the other."""
    return isinstance(value.data, ir.StorageBox) and isinstance(value.data.data, ir.Pointwise)


def reads_elsewhere(value: Any, base: Any) -> bool:
    """Whether what computes an element of a value reads others of a stored one than the element in its own place."""
    # As Inductor has it where it asks this itself: a layout that is open yet may be read, and is not decided by it.
    with replaced(ir.FlexibleLayout, "allow_indexing", True):
        read = extract_read_writes(value.make_loader(), value.get_size()).reads
        own = extract_read_writes(base.make_loader(), base.get_size()).reads
    return any(item.name == base.get_name() and item not in own for item in read)


def write_into(value: Any, base: Any) -> None:
    """Have a value written over a stored one, whose readers may see either."""
    ir.MutationLayoutSHOULDREMOVE.realize_into(value, base, unsafe_alias=True)
