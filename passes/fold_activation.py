"""FoldActivation: activations written by hand are named, needless ones dropped, and the rest joined to their layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import VIEWS, Refused, erase_unused, fake_value
from memopt.pass_manager import Change, Pass, PassResult, Refusal, attempt_each
from memopt.patterns.activations import spelling_of
from memopt.patterns.clamps import bounds_of, changes_nothing
from memopt.patterns.fused_ops import LAYERS, Activation, activation_of, fused_op
from memopt.program import Program, is_any_view, is_view
from memopt.torch_compat.operators import schema_of

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default}


class FoldActivation(Pass):
    """Make each activation one operation, and part of the layer before it where an engine has such an operator.

    Algebra: clamps are monotone functions closed under composition; a hand-written activation is a polynomial in x and
    one curve of a polynomial in x, compared coefficient by coefficient; an element-wise function commutes with a view.

    Cases, in this order:
        1. SiLU, GELU (erf and tanh form), hard-swish, hard-sigmoid, sigmoid and mish spelled out become one operation,
           with constants equal to the activation's to the precision of the dtype.
        2. What changes nothing goes: abs(abs(x)), relu(sigmoid(x)), relu(clamp(x, 0, 6)), a clamp within which its
           operand lies. A chain of clamps, relus and hardtanhs becomes one clamp; NaN stays NaN.
        3. An activation of an addmm (views in between allowed) or of a convolution, or of a convolution plus a tensor,
           becomes part of it by the operators in `memopt.patterns.fused_ops`: one result is written where two were.

    NaN stays NaN; infinity may become NaN in a GELU that was spelled out, as it does in `aten.gelu` on the CPU.

    Refusals:
        - An intermediate or the pre-activation has other users or is an output.
        - The constants of a spelled-out activation are not exact enough.
        - The device's engine has no such operator, not for this dtype, or not for this convolution.
        - The engine's operator may turn NaN into a number, unless the pass is made with `nan_free=True`.
        - The result would be laid out otherwise.

    Training programs are returned unchanged: backward reads the values before the activation.
    """

    name: ClassVar[str] = "fold_activation"
    tolerance: ClassVar[float] = 4.0

    def __init__(self, *, engine: bool = True, nan_free: bool = False) -> None:
        """Choose what is allowed.

        Args:
            engine: whether to use operators of the engines (case 3), which other backends cannot translate.
            nan_free: a promise that no layer's result holds NaN, which allows the operators that would hide it.
        """
        self.engine, self.nan_free = engine, nan_free

    def run(self, program: Program) -> PassResult:
        """Return the program with each activation rewritten that can be."""
        if program.training:
            return PassResult(program)
        new = program.copy()
        changes: list[Change] = []
        refusals: list[Refusal] = []

        def sweep(rewrite: Callable[[Program, fx.Node], Change | None], nodes: list[fx.Node]) -> None:
            made, refused = attempt_each(nodes, lambda node: rewrite(new, node))
            changes.extend(made)
            refusals.extend(refused)

        # Backwards, so that a whole hard-swish is seen before the hard-sigmoid inside it. Again, because a SiLU with a
        # spelled-out sigmoid is seen once the sigmoid has a name.
        named = -1
        while named < len(changes):
            named = len(changes)
            refusals.clear()
            sweep(_name_spelled_out, new.calls[::-1])
        sweep(_shorten, new.calls)
        if self.engine:
            sweep(self._join, new.calls)
        return PassResult.of(program, new, changes, refusals)

    def _join(self, program: Program, node: fx.Node) -> Change | None:
        """Case 3. Raises Refused before anything is edited."""
        activation = activation_of(node)
        if activation is None:
            return None
        views: list[fx.Node] = []
        before = node.all_input_nodes[0]
        while before.target in VIEWS:
            views.append(before)
            before = before.all_input_nodes[0]
        if before.target in _PRODUCTS:
            name = schema_of(before.target).name.removeprefix("aten::")
            raise Refused(f"no engine computes {name} and {activation.name} at once")
        if before.target is aten.add.Tensor and not views:
            layer, addend = _convolution_and_addend(program, before)
            if layer is None:
                return None
            return self._replace(program, node, activation, "convolution_add", layer, [before], addend)
        if before.target not in LAYERS:
            return None
        return self._replace(program, node, activation, LAYERS[before.target], before, views)

    def _replace(
        self,
        program: Program,
        node: fx.Node,
        activation: Activation,
        kind: str,
        layer: fx.Node,
        between: list[fx.Node],
        addend: fx.Node | None = None,
    ) -> Change:
        value = layer.meta["val"]
        what = f"{kind.replace('_', ' and ')} and {activation.name}"
        operator = fused_op(value.device.type, kind, activation)
        if operator is None:
            raise Refused(f"the {value.device.type} engine has no operator that computes {what} at once")
        for inner in (layer, *between):
            if len(inner.users) > 1:
                raise Refused(f"{inner.name}, which it is to join, has other users")
        if value.dtype not in operator.dtypes or node.meta["val"].dtype is not value.dtype:
            raise Refused(f"the engine's operator for {what} is not for {value.dtype}")
        if not operator.keeps_nan and not self.nan_free:
            raise Refused(f"the engine's operator for {what} may turn NaN into a number; nan_free=True allows it")
        reason = operator.unfit(program, layer)
        if reason is not None:
            raise Refused(reason)
        target, arguments, kwargs = operator.build(layer, addend, activation)
        fused_value = result = fake_value(program, target, arguments, kwargs)
        views = [] if addend is not None else between[::-1]
        for view in views:
            result = fake_value(program, view.target, (result, *view.args[1:]))  # type: ignore[arg-type]
        if result.stride() != node.meta["val"].stride() or value.stride() != fused_value.stride():
            raise Refused("the engine's operator lays its result out otherwise")
        with program.graph.inserting_before(layer):
            fused = program.graph.create_node(
                "call_function", target, arguments, kwargs, f"{layer.name}_{activation.name}"
            )
        fused.meta = {**layer.meta, "val": fused_value}
        last = fused
        with program.graph.inserting_before(node):
            for view in views:
                last = program.graph.call_function(view.target, (last, *view.args[1:]))  # type: ignore[arg-type]
                last.meta = {**view.meta, "val": fake_value(program, view.target, last.args)}  # type: ignore[arg-type]
        node.replace_all_uses_with(last)
        names = (layer.name, *(inner.name for inner in between[::-1]), node.name)
        erase_unused(program.graph, [node])
        return Change(f"{node.name} became part of {layer.name}", names, (fused.name,))


def _convolution_and_addend(program: Program, total: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The convolution that an addition can join, and what is added to it; Nones when no convolution is added."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    operands = [operand for operand in total.args if isinstance(operand, fx.Node)]
    found = [operand for operand in operands if operand.target is aten.convolution.default]
    if not found or len(total.all_input_nodes) != 2 or total.kwargs:
        return None, None
    layer = max(found, key=lambda node: order[node])
    addend = operands[0] if operands[1] is layer else operands[1]
    if order[addend] > order[layer]:
        raise Refused(f"{addend.name}, which is added to {layer.name}, is computed after it")
    ours, theirs = layer.meta["val"], addend.meta["val"]
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        raise Refused(f"{addend.name} has another shape, dtype or device than {layer.name}")
    if ours.stride() != theirs.stride():
        raise Refused(f"{addend.name} is laid out otherwise than {layer.name}")
    return layer, addend


def _name_spelled_out(program: Program, root: fx.Node) -> Change | None:
    """Case 1. Raises Refused before anything is edited."""
    found = spelling_of(program, root)
    if found is None:
        return None
    name = schema_of(found.target).name.removeprefix("aten::")
    new = _call(program, root, found.nodes[0], found.target, (found.x,), found.kwargs, name)
    root.replace_all_uses_with(new)
    erase_unused(program.graph, [root])
    return Change(f"{root.name} spells out {name}", tuple(node.name for node in found.nodes), (new.name,))


def _shares(node: fx.Node) -> bool:
    """Whether the node's value lies in its first operand's memory."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return is_any_view(node)


def _is_shown(node: fx.Node, outputs: set[fx.Node]) -> bool:
    """Whether the node or a view of it is an output. Read off the graph: values know nothing of edits just made."""
    return node in outputs or any(_is_shown(user, outputs) for user in node.users if _shares(user))


def _shorten(program: Program, node: fx.Node) -> Change | None:
    """Case 2. Raises Refused before anything is edited."""
    if changes_nothing(node):
        inner = node.all_input_nodes[0]
        root = inner
        while _shares(root):
            root = root.all_input_nodes[0]
        outputs = {value for value in program.output_nodes if isinstance(value, fx.Node)}
        if _is_shown(node, outputs) and (root.op == "placeholder" or _is_shown(root, outputs)):
            raise Refused(f"it changes nothing, but it and {inner.name} are both returned")
        if inner.meta["val"].stride() != node.meta["val"].stride():
            raise Refused(f"it changes nothing but the layout of {inner.name}")
        node.replace_all_uses_with(inner)
        erase_unused(program.graph, [node])
        return Change(f"{node.name} changes nothing", (node.name,), (inner.name,))
    bounds = bounds_of(node)
    if bounds is None:
        return None
    inner = node.all_input_nodes[0]
    first = bounds_of(inner)
    if first is None:
        return None
    if len(inner.users) > 1:
        raise Refused(f"{inner.name}, the clamp before it, has other users")
    target, arguments = first.then(bounds).call(inner.all_input_nodes[0])
    new = _call(program, node, inner, target, arguments, {}, node.name)
    node.replace_all_uses_with(new)
    erase_unused(program.graph, [node])
    return Change(f"{inner.name} and {node.name} are one clamp", (inner.name, node.name), (new.name,))


def _call(
    program: Program,
    old: fx.Node,
    place: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> fx.Node:
    """A new node before `place` that is to stand for `old`. Raises Refused when its layout would be another."""
    value = fake_value(program, target, args, kwargs)
    if value.stride() != old.meta["val"].stride():
        raise Refused(f"{name} would lay its result out otherwise")
    with program.graph.inserting_before(place):
        new = program.graph.create_node("call_function", target, args, kwargs, name)
    new.meta = {**old.meta, "val": value}
    return new
