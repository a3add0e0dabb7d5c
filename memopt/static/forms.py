"""How the static backend writes each operator's results into memory that it is given, if it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.memory.aliasing import Aliasing
from memopt.memory.over_operands import inplace_overload
from memopt.passes.plan_buffers import Form
from memopt.program import is_effectful, is_random, is_view, tensors_of
from memopt.static.lower import has_recipe, lower
from memopt.static.write import LAYOUT, Out, Write, is_true_out, number, out_overload, table
from memopt.torch_compat.operators import OpOverload, overload_name, schema_of


def makes_view(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether the node only looks at memory that is there: by its schema, or by what it does (`_unsafe_view`)."""
    if is_view(node):
        return True
    storages = aliasing.of.get(node, ())
    return (
        bool(storages)
        and "inplace" not in node.meta
        and all(aliasing.storages[s].producer is not node for s in storages)
    )


def write_of(node: fx.Node) -> Write | None:
    """How to compute a call node into given memory; None when its operator has to allocate its results itself.

    Random and effectful operators, and those of other devices or layouts, are left as they are.
    """
    if not isinstance(node.target, OpOverload):
        return None
    if not has_recipe(node.target) and (is_random(node) or is_effectful(node)):
        return None
    values = [*tensors_of(node), *(t for n in node.all_input_nodes for t in tensors_of(n))]
    if not tensors_of(node) or any(t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in values):
        return None
    if any(t.device.type not in ("cpu", "cuda") for t in values) or len({t.device for t in tensors_of(node)}) > 1:
        return None
    return lower(node) or _generic(node) or _over_first(node)


def _generic(node: fx.Node) -> Write | None:
    target = _with_tensor_operand(node)
    overload = out_overload(target)
    if overload is None or not is_true_out(overload):
        return None
    args, kwargs = _as_tensors(node, overload)
    if any(kwargs.get(name) is not None for name in LAYOUT):
        kwargs = {name: value for name, value in kwargs.items() if name not in LAYOUT}
    names = [a.name for a in schema_of(overload).arguments if a.is_out]
    outs = {name: Out(index) for index, name in enumerate(names)}
    slices = bool(table()[str(overload)].get("slices")) or torch.Tag.pointwise in target.tags
    return Write(overload, args, {**kwargs, **outs}, Form(slices=slices))


def _with_tensor_operand(node: fx.Node) -> OpOverload:
    """`mul.Tensor` for `mul.Scalar`: out= overloads for Python numbers are generated ones, which copy."""
    target: Any = node.target
    overload = out_overload(target)
    if overload_name(target) == "Scalar" and (overload is None or not is_true_out(overload)):
        packet = getattr(getattr(torch.ops, target.namespace), schema_of(target).name.split("::")[1])
        twin = getattr(packet, "Tensor", None)
        if twin is not None and len(schema_of(twin).arguments) == len(schema_of(target).arguments):
            return twin  # type: ignore[no-any-return]
    return target  # type: ignore[no-any-return]


def _as_tensors(node: fx.Node, overload: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments, with 0-dim tensors for numbers where the overload wants tensors."""

    def fill(given: Any, kind: str) -> Any:
        if kind in ("Tensor", "Optional[Tensor]") and isinstance(given, (bool, int, float)):
            return number(given, node)
        return given

    kinds = {a.name: str(a.type) for a in schema_of(overload).arguments}
    names = [a.name for a in schema_of(overload).arguments if not a.is_out]
    args = tuple(fill(value, kinds[name]) for name, value in zip(names, node.args, strict=False))
    return args, {name: fill(value, kinds.get(name, "")) for name, value in node.kwargs.items()}


def _over_first(node: fx.Node) -> Write | None:
    """An in-place overload, on a copy of the first argument; on the argument itself where the node is annotated so."""
    overload = inplace_overload(node.target)
    if "inplace" in node.meta and overload is not None:
        return Write(overload, tuple(node.args), dict(node.kwargs))
    return None


# -- concatenations -----------------------------------------------------------------------------------------------


def is_joinable(node: fx.Node) -> bool:
    """Whether the node is a concatenation whose parts can be copied into slices one by one."""
    if node.target is not torch.ops.aten.cat.default:
        return False
    values = [node.meta["val"], *(part.meta["val"] for part in node.args[0])]  # type: ignore[union-attr]
    return all(v.layout is torch.strided and not v.is_conj() and not v.is_neg() for v in values)


def cat_dim(node: fx.Node) -> int:
    """The dimension of a concatenation, as it was given."""
    dim: int = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)  # type: ignore[assignment]
    return dim


def parts_to_copy(node: fx.Node, joined: Sequence[bool]) -> list[tuple[fx.Node, int, int]]:
    """The parts of a concatenation that are not in their place yet: each with where it starts and how long it is."""
    given: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    found, start = [], 0
    for part, done in zip(given, joined, strict=True):
        value = part.meta["val"]
        length = value.shape[cat_dim(node)] if value.numel() else 0
        if length and not done:
            found.append((part, start, length))
        start += length
    return found
