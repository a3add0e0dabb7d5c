"""FuseConvBn: a convolution or linear layer takes the batch norm that follows it into its weights."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import (
    VIEWS,
    Refused,
    add_constant,
    drop_unused_constants,
    erase_unused,
    fake_value,
)
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.patterns.batch_norm import scale_and_shift
from memopt.program import InputKind, Program
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.storages import storage_id

aten = torch.ops.aten
_EVAL = aten._native_batch_norm_legit_no_training.default
_TRAINING = {
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
}
_RESHAPES = {*VIEWS, aten.unsqueeze.default}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class FuseConvBn(Pass):
    """Fold an eval-mode batch norm into the weights of the layer that feeds it.

    Algebra: with s = gamma / sqrt(variance + eps), batch norm gives, channel by channel,
    s·(Wx + b - mean) + beta = (s·W)x + (s·(b - mean) + beta).
    The products are computed in float64 on the host and cast once, to the weight's dtype.

    Cases:
        1. Convolution of 1, 2 or 3 dimensions, grouped or not: s scales dimension 0 of W.
        2. Transposed convolution: W is [in, out / groups, ...], so s scales dimension 1, group by group.
        3. Linear (addmm or mm, the weight behind a `t` or not) before a batch norm over (N, C), with views in between
           that keep the last dimension: s scales the output features.
        4. A bias that is added by an operation of its own, between the layer and the batch norm, is folded as well.
        A layer without bias gets one. Absent gamma is 1, absent beta is 0. Where s is 1, as far as the weight's dtype
        tells, the weight itself stays.

    Refusals:
        - The layer's result, or a value between it and the batch norm, has other users or is an output.
        - The weight or the bias is shared with another node (a folded copy would come on top of it), is computed, has
          no known value, or is changed by the program; so for the batch norm's own tensors, but for sharing.
        - The batch norm is in training mode, or its saved statistics are used.
        - Dtypes differ; the scale or a folded value is not finite; the layouts of the results differ.
        - A linear layer before a batch norm over (N, C, L): that normalises dimension 1, not the features.
        - A batch norm before a convolution: at zero padding its shift is missing, so it cannot be folded forwards.

    Training programs are returned unchanged. Every parameter and buffer that is read becomes `baked`.
    """

    name: ClassVar[str] = "fuse_conv_bn"
    tolerance: ClassVar[float] = 4.0

    def run(self, program: Program) -> PassResult:
        """Return the program with every batch norm folded that can be."""
        if program.training:
            return PassResult(program)
        new = program.copy()

        def fold(node: fx.Node) -> Change | None:
            nonlocal new
            layer = _match(new, node) if node.target is _EVAL or node.target in _TRAINING else None
            if layer is None:
                return None
            new, change = _fold(new, node, layer)
            return change

        changes, refusals = attempt_each(new.calls, fold)
        new, _ = drop_unused_constants(new)
        return PassResult.of(program, new, changes, refusals)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """What feeds a batch norm: `call` with its weight and bias placeholders.

    Attributes:
        transpose: the node between the weight and the call of a linear layer, if any.
        additions: (node, constant vector's node) of each separate bias addition.
        views: views between the call and the batch norm, in order.
    """

    call: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transpose: fx.Node | None
    additions: tuple[tuple[fx.Node, fx.Node], ...]
    views: tuple[fx.Node, ...] = ()


def _match(program: Program, norm: fx.Node) -> _Layer | None:
    """The layer to fold into; None when none feeds the batch norm. Raises Refused."""
    additions: list[tuple[fx.Node, fx.Node]] = []
    between: list[fx.Node] = []
    node = norm.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function":
        between.append(node)
        vector = _added_vector(program, node, norm)
        if vector is not None:
            additions.append((node, vector))
            node = node.all_input_nodes[0] if node.all_input_nodes[0] is not vector else node.all_input_nodes[1]
        elif node.target in VIEWS:
            node = node.args[0]
        else:
            break
    if not isinstance(node, fx.Node):
        return None
    convolution = node.target is aten.convolution.default
    if not convolution and node.target not in (aten.addmm.default, aten.mm.default):
        if any(user.target is aten.convolution.default for result in norm.users for user in result.users):
            raise Refused("it precedes its convolution: at zero padding its shift would be missing")
        return None
    if norm.target is not _EVAL:
        raise Refused("it is in training mode: it normalises by the statistics of the batch")
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in norm.users):
        raise Refused("its saved statistics are used")
    for value in between:
        if len(value.users) > 1:
            raise Refused(f"{value.name}, which it normalises, has other users")
    if convolution:
        if any(value.target in VIEWS for value in between):
            raise Refused("a view stands between the convolution and it")
        return _convolution(node, tuple(additions))
    return _linear(node, norm, between, tuple(additions))


def _convolution(call: fx.Node, additions: tuple[tuple[fx.Node, fx.Node], ...]) -> _Layer:
    weight, bias = call.args[1], call.args[2]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder":
        raise Refused(f"the weight of {call.name} is computed")
    if isinstance(bias, fx.Node) and bias.op != "placeholder":
        raise Refused(f"the bias of {call.name} is computed")
    return _Layer(call, weight, bias if isinstance(bias, fx.Node) else None, None, additions)


def _linear(
    call: fx.Node, norm: fx.Node, between: list[fx.Node], additions: tuple[tuple[fx.Node, fx.Node], ...]
) -> _Layer:
    features = call.meta["val"].shape[1]
    if any(value.meta["val"].shape[-1] != features for value in between) or between[0].meta["val"].ndim != 2:
        raise Refused(f"it normalises dimension 1, but the features of {call.name} are in the last dimension")
    if call.kwargs:
        raise Refused(f"{call.name} scales its operands")
    bias, matrix = (call.args[0], call.args[2]) if call.target is aten.addmm.default else (None, call.args[1])
    if isinstance(bias, fx.Node) and (bias.op != "placeholder" or tuple(bias.meta["val"].shape) != (features,)):
        raise Refused(f"the bias of {call.name} is computed, or no vector")
    transpose = matrix if isinstance(matrix, fx.Node) and matrix.target is aten.t.default else None
    views = tuple(value for value in reversed(between) if value.target in VIEWS)
    weight = transpose.args[0] if transpose is not None else matrix
    if not isinstance(weight, fx.Node) or weight.op != "placeholder":
        raise Refused(f"the weight of {call.name} is computed")
    return _Layer(call, weight, bias if isinstance(bias, fx.Node) else None, transpose, additions, views)


def _added_vector(program: Program, node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """The node of the per-channel constant that `node` adds to its other operand; None when it does not."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    shape = norm.args[0].meta["val"].shape  # type: ignore[union-attr]
    channels, trailing = shape[1], len(shape) - 2
    for operand in node.all_input_nodes:
        source = operand
        while source.target in _RESHAPES:
            source = source.args[0]  # type: ignore[assignment]
        found = list(operand.meta["val"].shape)
        if source.name not in program.state or operand.meta["val"].numel() != channels:
            continue
        if found[len(found) - trailing - 1 :] == [channels, *[1] * trailing] and len(found) > trailing:
            return operand
    return None


@dataclasses.dataclass(frozen=True)
class Folding:
    """What a layer's weight and bias become when they take in the batch norm that follows.

    Attributes:
        weight, bias: the layer's placeholders; a layer may have no bias.
        added: placeholders of vectors that operations of their own add.
        folded_weight, folded_bias: on the weight's device, of its dtype.
        is_scaled_by_one: whether the weight stays as it is, as far as its dtype tells: so it is where it was folded.
        read: names of the inputs whose values were read.
    """

    weight: fx.Node
    bias: fx.Node | None
    added: tuple[fx.Node, ...]
    folded_weight: torch.Tensor
    folded_bias: torch.Tensor
    is_scaled_by_one: bool
    read: frozenset[str]


def foldings(program: Program) -> Iterator[tuple[fx.Node, Folding]]:
    """Every batch norm of an inference program that can be folded, and what comes of it; refusals are left out."""
    for node in program.calls:
        try:
            layer = _match(program, node) if node.target is _EVAL else None
            if layer is not None:
                yield node, _folding(program, node, layer)
        except Refused:
            continue


def _fold(program: Program, norm: fx.Node, layer: _Layer) -> tuple[Program, Change]:
    """Rewrite one match in the program being edited. Raises Refused before anything is edited."""
    results = list(norm.users)
    return _rewrite(program, norm, layer, results, _folding(program, norm, layer))


def _folding(program: Program, norm: fx.Node, layer: _Layer) -> Folding:
    call, dtype = layer.call, layer.weight.meta["val"].dtype
    for node in (layer.weight, layer.bias, layer.transpose):
        if node is not None and (len(node.users) > 1 or is_aliased(program, node)):
            raise Refused(f"{node.name}, which {call.name} reads, is shared")
    tensors = (layer.weight, layer.bias, *norm.args[1:5], *(vector for _, vector in layer.additions))
    values = {node: _value(program, node) for node in tensors if isinstance(node, fx.Node)}
    for node, value in values.items():
        if value.dtype is not dtype or dtype not in _FLOATS:
            raise Refused(f"{node.name} is {value.dtype}, the weight {dtype}")
    before, after = norm.args[0].meta["val"], norm.meta["val"][0]  # type: ignore[union-attr]
    if before.dtype is not dtype or after.dtype is not dtype or before.stride() != after.stride():
        raise Refused("its result has another dtype or layout than the layer's")

    def read(node: fx.Node) -> torch.Tensor:
        return values[node].to("cpu", torch.float64).reshape(-1)

    vectors = [node for node in (layer.bias, *(vector for _, vector in layer.additions)) if node is not None]
    scale, shift = scale_and_shift(norm, read, [read(node) for node in vectors])
    weight = _scaled(call, values[layer.weight].to("cpu", torch.float64), scale, layer.transpose is not None)
    folded = weight.to(dtype)
    bias = shift.to(dtype)
    if not all(bool(torch.isfinite(value).all()) for value in (scale, folded, bias)):
        raise Refused("its scale, or a value folded with it, is not finite")
    if call.target is aten.convolution.default:
        fake_bias = layer.weight.meta["val"].new_empty(bias.shape)
        arguments = (*call.args[:2], fake_bias, *call.args[3:])
        if fake_value(program, aten.convolution.default, arguments).stride() != call.meta["val"].stride():
            raise Refused(f"with a bias the result of {call.name} has another layout")
    device = values[layer.weight].device
    return Folding(
        layer.weight,
        layer.bias,
        tuple(vector for _, vector in layer.additions),
        folded.to(device),
        bias.to(device),
        bool(((scale - 1).abs() <= torch.finfo(dtype).eps / 2).all()),
        frozenset(_source(node).name for node in values),
    )


def _rewrite(
    program: Program,
    norm: fx.Node,
    layer: _Layer,
    results: list[fx.Node],
    folding: Folding,
) -> tuple[Program, Change]:
    call, graph = layer.call, program.graph
    old = [call, *layer.views, *(node for node, _ in layer.additions), norm, *results]
    stem = f"{call.name}_folded"
    weight_node, read = layer.weight, folding.read
    if folding.is_scaled_by_one:
        read -= {layer.weight.name}
    else:
        weight_node, program = add_constant(program, f"{stem}_weight", folding.folded_weight)
    bias_node, program = add_constant(program, f"{stem}_bias", folding.folded_bias)
    with graph.inserting_before(call):
        matrix = weight_node
        if layer.transpose is not None:
            matrix = graph.call_function(aten.t.default, (weight_node,))
            matrix.meta = {key: value for key, value in layer.transpose.meta.items() if key != "val"}
        if call.target is aten.convolution.default:
            target, arguments = call.target, (call.args[0], matrix, bias_node, *call.args[3:])
        else:
            data = call.args[1] if call.target is aten.addmm.default else call.args[0]
            target, arguments = aten.addmm.default, (bias_node, data, matrix)
        new = graph.create_node("call_function", target, arguments, name=stem)
    new.meta = dict(call.meta)
    last = new
    with graph.inserting_before(norm):
        # New nodes, because the old names stand for values before the batch norm.
        for view in layer.views:
            last = graph.create_node("call_function", view.target, (last, *view.args[1:]), name=f"{view.name}_folded")
            last.meta = dict(view.meta)
    for result in results:
        result.replace_all_uses_with(last)
    erase_unused(graph, results or [norm])
    kinds = {entry.name: entry.kind for entry in program.inputs}
    baked = {name for name in read if kinds[name] is not InputKind.CONSTANT}
    program = dataclasses.replace(program, baked=program.baked | baked)
    names = tuple(node.name for node in old)
    return program, Change(f"folded {norm.name} into the weights of {call.name}", names, (new.name,))


def _scaled(call: fx.Node, weight: torch.Tensor, scale: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The weight with each output channel scaled, in the weight's own layout."""
    if call.target is aten.convolution.default:
        if not call.args[6]:
            return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
        groups = int(call.args[8])  # type: ignore[arg-type]
        per_group = weight.shape[0] // groups
        # Rows of one group of inputs feed one group of outputs: [in, out / groups] scales, one row per input channel.
        rows = scale.reshape(groups, -1).repeat_interleave(per_group, dim=0)
        return weight * rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))
    return weight * (scale.reshape(-1, 1) if transposed else scale)


def _source(node: fx.Node) -> fx.Node:
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _value(program: Program, node: fx.Node) -> torch.Tensor:
    source = _source(node)
    value = program.state.get(source.name)
    if source.op != "placeholder":
        raise Refused(f"{source.name} is computed")
    if value is None or isinstance(value, FakeTensor) or value.is_meta:
        raise Refused(f"{source.name} has no known value")
    if source.name in program.mutated:
        raise Refused(f"{source.name} is changed by the program")
    return value


def is_aliased(program: Program, node: fx.Node) -> bool:
    """Whether another input that the program reads shares the placeholder's storage (tied weights)."""
    value = program.state.get(node.name)
    if value is None:
        return False
    storage = storage_id(value)
    return any(
        other is not node
        and other.users
        and other.name in program.state
        and storage_id(program.state[other.name]) == storage
        for other in program.placeholders
    )
