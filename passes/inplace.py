"""Inplace: a result takes the storage of an operand that dies there and is read index by index."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import forget_inplace
from memopt.memory.aliasing import Aliasing, analyse
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.patterns.product_sums import ADD_PRODUCT
from memopt.program import Phase, Program, tensors_of
from memopt.torch_compat.operators import OpOverload, operator_name, schema_of

_MOST_REFUSALS = 50

_aten = torch.ops.aten
_UNTAGGED = (_aten.hardswish.default, _aten.masked_fill.Tensor)  # element-wise, though torch does not say so
_SUMS = (_aten.addmm.default, ADD_PRODUCT)  # element-wise in the first operand only
_OUT_OVERLOADS = {
    _aten.elu_backward.default: _aten.elu_backward.grad_input,
    _aten.gelu_backward.default: _aten.gelu_backward.grad_input,
    _aten.hardsigmoid_backward.default: _aten.hardsigmoid_backward.grad_input,
    _aten.hardtanh_backward.default: _aten.hardtanh_backward.grad_input,
    _aten.leaky_relu_backward.default: _aten.leaky_relu_backward.grad_input,
    _aten.maximum.default: _aten.maximum.out,
    _aten.minimum.default: _aten.minimum.out,
    _aten.sigmoid_backward.default: _aten.sigmoid_backward.grad_input,
    _aten.silu_backward.default: _aten.silu_backward.grad_input,
    _aten.softplus_backward.default: _aten.softplus_backward.grad_input,
    _aten.tanh_backward.default: _aten.tanh_backward.grad_input,
    _aten.threshold_backward.default: _aten.threshold_backward.grad_input,
}


class Inplace(Pass):
    """Annotates element-wise nodes whose result may be written over their first operand.

    Algebra: result[i] = f(x[i], ...) reads index i of its operands only, so it may be written to x's memory index by
    index, if nobody reads x afterwards. The graph stays functional: `meta["inplace"] = 0` says that the result takes
    the storage of argument 0, and a backend that follows it calls the overload that `inplace_overload` gives. A matrix
    product that is added to x reads x so, and its factors in another way.

    A node is annotated when

    1. its operator is element-wise, or `addmm`, draws no random numbers, and has an in-place form (see
       `inplace_overload`);
    2. its result has the shape, strides, dtype and device of argument 0, which fills its whole storage without overlap;
    3. no later node reads any value in that storage: views, items of multiple results and values that took the same
       storage before are found by the identity of storages, not by names;
    4. other arguments in the same storage have the same geometry (`x * x`, never `x + x.t()`); of `addmm` none is.

    Refused, with the reason, for nodes that meet 1 and 2: the storage belongs to an input (of any kind) or to an
    output, is read later, is read by the node itself in another geometry, or was made in forward while the node is in
    backward (autograd owns saved tensors, and may run backward twice on them). At most 50 refusals are kept, of the
    largest nodes. Annotations from earlier runs are forgotten first. A program with values that are annotated as fused
    is left as it is: the engine that fuses them reuses memory by itself.
    """

    name: ClassVar[str] = "inplace"
    tolerance: ClassVar[float] = 0.0

    def run(self, program: Program) -> PassResult:
        """Return the program with fresh annotations; one change per annotated node."""
        if any(node.meta.get("fused") for node in program.calls):
            return PassResult(program)
        new = program.copy()
        forget_inplace(new.graph)
        found, refusals = _Finder(new).find()
        before = {node.name: node.meta["inplace"] for node in program.calls if "inplace" in node.meta}
        if before == {node.name: 0 for node in found}:
            return PassResult(program, (), refusals)
        for node in found:
            node.meta["inplace"] = 0
        changes = [
            Change(f"{node.name} takes the storage of {node.args[0]}", (node.name,), (node.name,)) for node in found
        ]
        kept = {node.name for node in found}
        changes += [
            Change(f"{name} no longer takes the storage of an operand", (name,), (name,))
            for name in before
            if name not in kept
        ]
        return PassResult(new.finish(), tuple(changes), refusals)


def takes_storage(node: fx.Node) -> fx.Node | None:
    """The operand whose storage the node's result takes over; None when the result has a storage of its own."""
    if "inplace" not in node.meta:
        return None
    operand = node.args[node.meta["inplace"]]
    assert isinstance(operand, fx.Node)
    return operand


@functools.cache
def inplace_overload(target: object) -> Callable[..., Any] | None:
    """What computes an operator's result over its first argument, called with the same arguments.

    An in-place overload whose arguments are the same in name, type and order: `aten.relu_.default` for
    `aten.relu.default`; for backward formulas and maximum, which have none, their out= overload (see `WriteOver`). None
    when `target` is not element-wise (nor `addmm`), draws random numbers, or has neither.
    """
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return None
    if target in _OUT_OVERLOADS:
        return WriteOver(_OUT_OVERLOADS[target])
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if torch.Tag.pointwise not in target.tags and target not in (*_UNTAGGED, *_SUMS):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), operator_name(target) + "_", None)
    overloads = (getattr(packet, name) for name in packet.overloads()) if packet is not None else ()
    return next((overload for overload in overloads if _is_inplace_form(overload, target)), None)


def _is_inplace_form(overload: OpOverload, target: OpOverload) -> bool:
    ours, theirs = schema_of(target), schema_of(overload)
    if [(a.name, str(a.type)) for a in ours.arguments] != [(a.name, str(a.type)) for a in theirs.arguments]:
        return False
    written = [a.name for a in theirs.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (
        written == [ours.arguments[0].name]
        and [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns] == ["Tensor"]
        and ours.returns[0].alias_info is None
        and theirs.returns[0].alias_info is not None
    )


def may_overwrite(node: fx.Node) -> bool:
    """Whether operator and layouts allow the result to be written over argument 0, if nobody reads that later."""
    if inplace_overload(node.target) is None:
        return False
    operand = node.args[0] if node.args else None
    if not isinstance(operand, fx.Node):
        return False
    result, given = node.meta["val"], operand.meta["val"]
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor) or result.numel() == 0:
        return False
    if given.layout is not torch.strided or result.layout is not torch.strided:
        return False
    if (result.shape, result.dtype, result.device) != (given.shape, given.dtype, given.device):
        return False
    if result.stride() != given.stride() or given.is_conj() or given.is_neg():
        return False
    # A new result is dense, so the operand with the same strides is; overlap needs no check of its own.
    return given.untyped_storage().nbytes() == given.numel() * given.element_size()


@dataclasses.dataclass(frozen=True)
class WriteOver:
    """An operator that is given its first argument as its out= argument too."""

    overload: OpOverload

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result, which is `first` overwritten."""
        out = next(argument.name for argument in schema_of(self.overload).arguments if argument.is_out)
        return self.overload(first, *args, **kwargs, **{out: first})

    def __str__(self) -> str:
        return f"{self.overload}_over_first"


class _Finder:
    """Decides node by node, in order of execution; storages that were taken over count as one from then on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = {node: index for index, node in enumerate(program.graph.nodes)}
        self.aliasing: Aliasing = analyse(program)
        count = len(self.aliasing.storages)
        self.taken_from = list(range(count))
        self.readers: list[fx.Node | None] = [None] * count  # per storage, its last reader
        for node, indices in self.aliasing.of.items():
            for user in node.users:
                if user.target is not operator.getitem:
                    for index in indices:
                        self.readers[index] = self._later(self.readers[index], user)

    def _later(self, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        if a is None or b is None:
            return a or b
        return a if self.position[a] >= self.position[b] else b

    def _storage(self, index: int) -> int:
        while self.taken_from[index] != index:
            index = self.taken_from[index]
        return index

    def find(self) -> tuple[list[fx.Node], tuple[Refusal, ...]]:
        """The nodes to annotate, and the near misses."""
        found: list[fx.Node] = []
        refused: list[tuple[int, int, Refusal]] = []
        for node in self.program.calls:
            if not may_overwrite(node):
                continue
            mine, theirs = self.aliasing.of[node][0], self._storage(self.aliasing.of[node.args[0]][0])  # type: ignore[index]
            reason = self._reason_against(node, theirs)
            if reason is not None:
                size = self.aliasing.storages[mine].nbytes
                refused.append((-size, self.position[node], Refusal(node.name, reason)))
                continue
            self.taken_from[mine] = theirs
            self.readers[theirs] = self._later(self.readers[theirs], self.readers[mine])
            found.append(node)
        kept = sorted(refused)[:_MOST_REFUSALS]
        return found, tuple(refusal for _, _, refusal in sorted(kept, key=lambda item: item[1]))

    def _reason_against(self, node: fx.Node, storage: int) -> str | None:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        producer = self.aliasing.storages[storage].producer
        if producer.op != "call_function":
            return f"{operand.name} lives in the memory of the input {producer.name}"
        reader = self.readers[storage]
        assert reader is not None
        if reader.op == "output":
            return f"the memory of {operand.name} is returned to the caller"
        if self.position[reader] > self.position[node]:
            return f"the memory of {operand.name} is read later, by {reader.name}"
        if node.meta.get("phase") is Phase.BACKWARD and producer.meta.get("phase") is not Phase.BACKWARD:
            return f"{operand.name} is a saved tensor: backward may run again on it"
        geometry = _geometry(tensors_of(operand)[0])
        for other in node.all_input_nodes:
            for tensor, index in zip(tensors_of(other), self.aliasing.of[other], strict=True):
                if self._storage(index) != storage:
                    continue
                if node.target in _SUMS and other in node.args[1:]:
                    return f"it multiplies the memory of {operand.name} too, through {other.name}"
                if _geometry(tensor) != geometry:
                    return f"it reads the memory of {operand.name} in another order too, through {other.name}"
        return None


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, bits
