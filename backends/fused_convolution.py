"""Convolutions that cuDNN runs as one kernel with what follows them: a batch norm, an addition and a ReLU.

A kernel of its own for what follows reads and writes the whole result once more. cuDNN's fused kernels do not, but take
a vector to add and no vector to multiply by, so that a batch norm's scale must be in the weights. Folded weights that
are kept would be a second copy of the model's: they are made at each call just before their convolution instead, which
reads and writes far less than the result, and their memory is free again after it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.backends.timing import made_like, seconds_of
from memopt.graph.rewrite import add_constant, erase_unused, forget_inplace
from memopt.graph.synthesis import same_random_state
from memopt.patterns.batch_norm import scale_and_shift
from memopt.program import InputKind, Program

aten = torch.ops.aten

_NORM = aten._native_batch_norm_legit_no_training.default
_HALVES = {torch.float16, torch.bfloat16}
_LAST = torch.channels_last
_CAST = torch.ops.prims.convert_element_type.default

_library = torch.library.Library("memopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "convolution_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? added, int[] stride, int[] padding, "
    "int[] dilation, int groups) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


# By the nodes of a layer: its weight with the batch norm's scale, and the vector to be added after.
Made = dict[tuple[Any, ...], tuple[fx.Node, torch.Tensor | None]]


# `geometry` is the rest of the operator's arguments: stride, padding, dilation, groups.


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, added: torch.Tensor | None, *geometry: Any
) -> torch.Tensor:
    *spatial, groups = geometry
    result: torch.Tensor = aten.convolution.default(x, weight, bias, *spatial, False, [0, 0], groups)
    return (result if added is None else result + added).relu().contiguous(memory_format=_LAST)


def _cudnn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, added: torch.Tensor | None, *geometry: Any
) -> torch.Tensor:
    result: torch.Tensor
    if added is None:
        result = aten.cudnn_convolution_relu.default(x, weight, bias, *geometry)
    else:
        result = aten.cudnn_convolution_add_relu.default(x, weight, added, 1.0, bias, *geometry)
    return result.contiguous(memory_format=_LAST)  # it is so already, but for degenerate sizes


def _meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, added: torch.Tensor | None, *geometry: Any
) -> torch.Tensor:
    stride, padding, dilation, _ = geometry
    sizes = [
        (x.shape[2 + k] + 2 * padding[k] - dilation[k] * (weight.shape[2 + k] - 1) - 1) // stride[k] + 1
        for k in range(2)
    ]
    return torch.empty((x.shape[0], weight.shape[0], *sizes), dtype=x.dtype, device=x.device, memory_format=_LAST)


for _key, _kernel in (("CPU", _reference), ("CUDA", _cudnn), ("Meta", _meta)):
    _library.impl("convolution_relu", _kernel, _key)  # type: ignore[no-untyped-call]

FUSED = torch.ops.memopt.convolution_relu.default


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A convolution whose only reader is a batch norm, or what adds its result.

    Attributes:
        convolution: the call.
        norm: the batch norm after it; None where it has none.
        value: what stands for the result: of the convolution, or the first one of the batch norm.
    """

    convolution: fx.Node
    norm: fx.Node | None
    value: fx.Node


@dataclasses.dataclass(frozen=True)
class Fusion:
    """A ReLU of a convolution's result, with an addition before it or not.

    Attributes:
        relu: the last node.
        main: the convolution that becomes one kernel with the rest.
        side: what is added where that is the result of a batch norm after a convolution: its shift goes to `main`.
        added: the other operand of the addition; None without one.
    """

    relu: fx.Node
    main: _Branch
    side: _Branch | None
    added: fx.Node | None


def find_fusions(program: Program) -> list[Fusion]:
    """The places in an inference program where a convolution, what is added and a ReLU may be one kernel."""
    changed = program.mutated
    found = []
    for node in program.calls:
        if node.target is aten.relu.default:
            fusion = _fusion(program, node, changed)
            if fusion is not None:
                found.append(fusion)
    return found


def _fusion(program: Program, relu: fx.Node, changed: frozenset[str]) -> Fusion | None:
    source: Any = relu.args[0]
    main = _branch(program, source, changed)
    if main is not None:
        return Fusion(relu, main, None, None)
    if source.target is not aten.add.Tensor or source.kwargs or len(source.users) > 1:
        return None
    if any(not isinstance(operand, fx.Node) for operand in source.args):
        return None
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    operands: list[Any] = sorted(source.args, key=lambda node: -place[node])
    for value, other in (operands, operands[::-1]):
        main = _branch(program, value, changed)
        if main is None or value is other or other.meta["val"].shape != value.meta["val"].shape:
            continue
        if other.meta["val"].dtype is not value.meta["val"].dtype:
            continue
        side = _branch(program, other, changed)
        return Fusion(relu, main, side if side is not None and _movable(program, main, side, changed) else None, other)
    return None


def _movable(program: Program, main: _Branch, side: _Branch, changed: frozenset[str]) -> bool:
    """Whether what is added to the side's result can be added to the main one's instead."""
    biases: list[Any] = [branch.convolution.args[2] for branch in (main, side)]
    known = all(bias is None or (bias.name in program.state and bias.name not in changed) for bias in biases)
    return known and (side.norm is not None or biases[1] is not None)


def _branch(program: Program, value: fx.Node, changed: frozenset[str]) -> _Branch | None:
    outputs = program.output_nodes
    norm: Any = None
    node: Any = value
    if node.target is operator.getitem and node.args[1] == 0 and node.args[0].target is _NORM:
        norm = node.args[0]
        node = norm.args[0]
    if node.target is not aten.convolution.default or node.args[6] or node.meta["val"].dim() != 4:
        return None
    if any(len(item.users) > 1 or item in outputs for item in (value, norm, node) if item is not None):
        return None
    if norm is not None:
        read = [operand for operand in (*norm.args[1:5], node.args[2]) if operand is not None]
        if any(item.name not in program.state or item.name in changed for item in read):
            return None
    values: list[Any] = [value.meta["val"], *(operand.meta["val"] for operand in node.all_input_nodes)]
    dtypes = {item.dtype for item in values}
    return _Branch(node, norm, value) if len(dtypes) == 1 and dtypes <= _HALVES else None


def read_by(program: Program) -> frozenset[str]:
    """Names of the inputs whose present values `fuse_convolutions` reads: of batch norms, and of biases."""
    read: list[Any] = []
    for node in program.calls:
        if node.target is _NORM:
            source: Any = node.args[0]
            read += [*node.args[1:5], source.args[2] if source.target is aten.convolution.default else None]
    for fusion in find_fusions(program):
        if fusion.side is not None:
            read += [branch.convolution.args[2] for branch in (fusion.main, fusion.side)]
    kept = {entry.name for entry in program.inputs if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    return frozenset(node.name for node in read if node is not None and node.name in kept & set(program.state))


def fuse_convolutions(program: Program, worth: Callable[[Program, Fusion], bool] | None = None) -> Program:
    """A program with fused convolutions, and with batch norms that are left as one product and one sum.

    Args:
        program: an inference program in half precision.
        worth: whether a fusion pays; None: all are made.

    Returns:
        The program, or the given one where there is nothing to do.
    """
    new = program.copy()
    fusions = [fusion for fusion in find_fusions(new) if worth is None or worth(new, fusion)]
    made: Made = {}
    for fusion in fusions:
        new = _fuse(new, fusion, made)
    norms = [node for node in new.calls if node.target is _NORM and _is_plain(new, node)]
    for norm in norms:
        new = _multiply_and_add(new, norm)
    if not fusions and not norms:
        return program
    forget_inplace(new.graph)
    return new.finish()


def _scale_and_shift(program: Program, norm: fx.Node, bias: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The two vectors of a batch norm, after a bias, in float64."""

    def read(node: fx.Node) -> torch.Tensor:
        return program.state[node.name].detach().double()

    return scale_and_shift(norm, read, () if bias is None else (read(bias),))


def _fuse(program: Program, fusion: Fusion, made: Made) -> Program:
    graph, call = program.graph, fusion.main.convolution
    added = fusion.added and _other(fusion)
    bias = call.args[2]
    program, weight, shift = _without_norm(program, fusion.main, fusion.relu, made)
    if fusion.side is not None:
        side = fusion.side.convolution
        program, side_weight, side_shift = _without_norm(program, fusion.side, side, made)
        assert shift is not None and side_shift is not None
        shift = shift + side_shift
        with graph.inserting_before(side):
            added = graph.call_function(side.target, (side.args[0], side_weight, None, *side.args[3:]))  # type: ignore[arg-type]
        added.meta = dict(side.meta)
    if fusion.main.norm is not None or fusion.side is not None:
        assert shift is not None
        bias, program = add_constant(program, f"{call.name}_shift", shift.to(call.meta["val"].dtype))
    with graph.inserting_before(fusion.relu):
        operands = [_channels_last(graph, call.args[0]), weight]
        other = None if added is None else _channels_last(graph, added)
        fused = graph.call_function(FUSED, (*operands, bias, other, *call.args[3:6], call.args[8]))
    fused.meta = {key: value for key, value in fusion.relu.meta.items() if key != "val"}
    fusion.relu.replace_all_uses_with(fused)
    erase_unused(graph, [fusion.relu])
    return program


def _other(fusion: Fusion) -> Any:
    """The other operand of the addition, as it is now: an earlier fusion may have replaced it."""
    source: Any = fusion.relu.args[0]
    return next(operand for operand in source.args if operand is not fusion.main.value)


def _without_norm(
    program: Program, branch: _Branch, where: fx.Node, made: Made
) -> tuple[Program, fx.Node, torch.Tensor | None]:
    """The weight of a convolution, scaled by nodes before `where` if a batch norm follows; and what its result takes.

    The vector to be added to the result is in float64, and None where it is not known. What was made for the same
    layer before, for another chunk of the batch, serves again.
    """
    call, norm = branch.convolution, branch.norm
    weight: Any = call.args[1]
    if norm is None:
        with program.graph.inserting_before(where):
            return program, _channels_last(program.graph, weight), _known_bias(program, call)
    value, layer = weight.meta["val"], (weight, call.args[2], norm.args[1:5], norm.args[-1])
    if layer in made:
        return program, *made[layer]
    scale, shift = _scale_and_shift(program, norm, call.args[2])
    factor, program = add_constant(program, f"{call.name}_scale", scale.float().reshape(-1, 1, 1, 1))
    graph = program.graph
    with graph.inserting_before(where):
        wide = graph.call_function(_CAST, (weight, torch.float32))
        product = graph.call_function(aten.mul.Tensor, (wide, factor))
        narrow = graph.call_function(_CAST, (product, value.dtype))
        result = _channels_last(graph, narrow, value)
    made[layer] = result, shift
    return program, result, shift


def _known_bias(program: Program, call: fx.Node) -> torch.Tensor | None:
    """A convolution's bias in float64, zeros where it has none; None where its values are not known."""
    bias: Any = call.args[2]
    if bias is None:
        weight: Any = call.args[1]
        device = program.state[weight.name].device if weight.name in program.state else None
        return torch.zeros(call.meta["val"].shape[1], dtype=torch.float64, device=device)
    return program.state[bias.name].detach().double() if bias.name in program.state else None


def _channels_last(graph: fx.Graph, node: Any, value: torch.Tensor | None = None) -> fx.Node:
    """The value laid out channels-last: the node itself where it is."""
    value = node.meta.get("val") if value is None else value
    if node.target is FUSED or (value is not None and value.is_contiguous(memory_format=_LAST)):
        return node  # type: ignore[no-any-return]
    return graph.call_function(aten.clone.default, (node,), {"memory_format": _LAST})


def _is_plain(program: Program, norm: fx.Node) -> bool:
    """Whether a batch norm's vectors are known, and only its result is used."""
    x: Any = norm.args[0]
    operands: list[Any] = [operand for operand in norm.args[1:5] if operand is not None]
    changed = program.mutated
    known = all(operand.name in program.state and operand.name not in changed for operand in operands)
    only = all(user.target is operator.getitem and user.args[1] == 0 for user in norm.users)
    return known and only and x.meta["val"].dtype in (*_HALVES, torch.float32)


def _multiply_and_add(program: Program, norm: fx.Node) -> Program:
    x: Any = norm.args[0]
    value = x.meta["val"]
    scale, shift = _scale_and_shift(program, norm)
    shape = [-1] + [1] * (value.dim() - 2)
    factor, program = add_constant(program, f"{norm.name}_scale", scale.float().reshape(shape))
    term, program = add_constant(program, f"{norm.name}_shift", shift.float().reshape(shape))
    graph = program.graph
    with graph.inserting_before(norm):
        wide = x if value.dtype is torch.float32 else graph.call_function(_CAST, (x, torch.float32))
        product = graph.call_function(aten.mul.Tensor, (wide, factor))
        result = graph.call_function(aten.add.Tensor, (product, term))
        if value.dtype is not torch.float32:
            result = graph.call_function(_CAST, (result, value.dtype))
    results = list(norm.users)
    for old in results:
        old.replace_all_uses_with(result)
    erase_unused(graph, results)
    return program


class Worth:
    """Whether a fusion pays, by runs on made-up values on the device; each distinct one is timed once."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def __call__(self, program: Program, fusion: Fusion) -> bool:
        """Whether it is faster as one kernel, the weights made anew, than as a convolution and another kernel."""
        call = fusion.main.convolution
        operands = [_described(operand) for operand in call.args[:3]]
        key = f"{operands} {call.args[3:]} {fusion.main.norm is None} {fusion.added is None}"
        if key not in self._known:
            with torch.no_grad(), same_random_state([node.meta["val"] for node in program.placeholders]):
                self._known[key] = _pays(fusion)
        return self._known[key]


def _described(operand: Any) -> Any:
    value = None if operand is None else operand.meta["val"]
    return None if value is None else (tuple(value.shape), value.stride(), value.dtype, value.device)


def _pays(fusion: Fusion) -> bool:
    call = fusion.main.convolution
    try:
        return _is_faster(call, scaled=fusion.main.norm is not None, added=fusion.added is not None)
    except RuntimeError:  # cuDNN has no such kernel here, or there is no memory to try it in
        return False


def _is_faster(call: fx.Node, *, scaled: bool, added: bool) -> bool:
    operands: Any = [operand.meta["val"] for operand in call.all_input_nodes[:2]]
    x, weight = (made_like(value, _LAST) for value in operands)
    bias, factor = x.new_zeros(weight.shape[0]), x.new_ones(weight.shape[0], 1, 1, 1)
    other = made_like(call.meta["val"], _LAST) if added else None
    arguments: Any = (*call.args[3:6], call.args[8])

    def fused() -> None:
        FUSED(x, weight * factor if scaled else weight, bias, other, *arguments)

    def apart() -> None:
        result = aten.convolution.default(x, weight, None, *call.args[3:])
        result.relu_() if other is None else result.add_(other)

    return seconds_of(fused, x.device) < seconds_of(apart, x.device)
