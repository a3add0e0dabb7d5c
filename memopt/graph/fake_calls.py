"""Fake values kept with the calls that they came of: what a rewrite left alone is not run again on fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.graph import equal_calls
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import no_modes
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, has_symbols, suggest_memory_format
from memopt.torch_compat.operators import nnpack_enabled
from memopt.torch_compat.storages import storage_id

# Where a node keeps the call that its value came of.
MARK = "fake_call"

# Arguments that are what their type and value say.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex)
_BACKWARD = torch.ops.aten.convolution_backward.default
# A convolution's layout depends on settings of oneDNN, cuDNN and others, which are no arguments.
_SET = {torch.ops.aten.convolution.default, _BACKWARD}
# The layouts that keep channels together, by the number of dimensions.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# The image and the weight among a convolution's operands: where one lies channels last, cuDNN gives results that do.
_LAYING_OUT = {torch.ops.aten.convolution.default: (0, 1), _BACKWARD: (1, 2)}
# The image among a batch norm's operands: on a CPU results are contiguous or channels last, as it is, and lie no other
# way; their rules for fake tensors say that they lie as it does.
_NORMS = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten._native_batch_norm_legit.default: 0,
    torch.ops.aten._native_batch_norm_legit.no_stats: 0,
    torch.ops.aten._native_batch_norm_legit_functional.default: 0,
    torch.ops.aten._native_batch_norm_legit_no_training.default: 0,
    torch.ops.aten._batch_norm_with_update.default: 0,
    torch.ops.aten._batch_norm_with_update_functional.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
    torch.ops.aten.batch_norm_backward.default: 1,
}
# Their rules for fake tensors make operands contiguous in a way that PyTorch without CUDA refuses for tensors of a GPU.
_CONTIGUOUS = {torch.ops.aten._log_softmax.default, torch.ops.aten._softmax.default}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator on fake values.

    Attributes:
        node: the node's name: two nodes never share a value, be their calls equal.
        target: the operator.
        arguments: all arguments, a place holder for each operand.
        operands: the values of the nodes among them.
        mode: the fake mode that it runs in.
        plain: whether all other arguments are what their types and values say.
        settings: what the value depends on beside them.
        facts: what was found of the call, by what asked, that depends on layouts, and on which operands are the same:
            copies of a program, and plans of it, make the very same calls.
    """

    node: str
    target: Any
    arguments: Any
    operands: tuple[Any, ...]
    mode: FakeTensorMode
    plain: bool = True
    settings: tuple[Any, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Kept:
    """A value with the call that it came of, and what the node held then: the very same is not looked at again.

    `operands` are the nodes in these arguments, in order; None until they are asked for.
    """

    call: Call
    aliased: bool
    value: Any
    args: Any = dataclasses.field(compare=False, repr=False)
    kwargs: Any = dataclasses.field(compare=False, repr=False)
    operands: list[fx.Node] | None = dataclasses.field(default=None, compare=False, repr=False)


def call_of(node: fx.Node, values: Mapping[fx.Node, Any], mode: FakeTensorMode) -> Call:
    """The call that a node makes, with the values of what it reads."""
    operands: list[Any] = []
    odd: list[Any] = []

    def key(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            operands.append(values[argument])
            return fx.Node
        if isinstance(argument, (tuple, list)):
            return tuple(key(item) for item in argument)
        if type(argument) in _PLAIN:
            return type(argument), argument
        odd.append(argument)
        return object()  # equal to nothing

    arguments = key(node.args), tuple((name, key(value)) for name, value in node.kwargs.items())
    return Call(node.name, node.target, arguments, tuple(operands), mode, not odd, _settings(node.target))


def kind_of(call: Call) -> Any | None:
    """As `equal_calls.key_of`, of a call."""
    return equal_calls.key_of(call.target, call.arguments, call.operands, call.settings) if call.plain else None


def apart(value: FakeTensor) -> FakeTensor:
    """A fake tensor of the same layout with memory of its own, made where no mode sees it."""
    with no_modes():
        plain = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, plain, value.device)


def _settings(target: Any) -> tuple[Any, ...]:
    return library_settings() if target in _SET else ()


def library_settings() -> tuple[Any, ...]:
    """What decides by which of its libraries torch runs an operator, and so how its results lie."""
    cudnn, onednn = torch.backends.cudnn, torch.backends.mkldnn
    return (
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (onednn.enabled, onednn.deterministic),
        nnpack_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


def run(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of an operator; a device that is not here does not matter."""
    if target in _CONTIGUOUS and not args[0].is_contiguous():
        args = (torch.ops.aten.clone.default(args[0], memory_format=torch.contiguous_format), *args[1:])
    result = target(*args, **kwargs)
    if target in _NORMS and args[_NORMS[target]].device.type == "cpu":
        return _as_on_cpu(args[_NORMS[target]], result)
    return _as_on_cuda(target, args, result) if target in _LAYING_OUT and not _has_cudnn() else result


def _has_cudnn() -> bool:
    """Whether torch can ask cuDNN: it is compiled with it, and there is a GPU."""
    return bool(torch.backends.cudnn.is_available() and torch.cuda.is_available())  # type: ignore[no-untyped-call]


def _as_on_cpu(image: torch.Tensor, result: Any) -> Any:
    """A batch norm's results as they lie on a CPU."""
    form = suggest_memory_format(image)
    first, *others = result
    if first is None or first.is_contiguous(memory_format=form):  # no gradient of the image is asked for
        return result
    return torch.ops.aten.clone.default(first, memory_format=form), *others


def _as_on_cuda(target: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Images and weights of a GPU as cuDNN lays them out, where this PyTorch has none to ask."""
    operands = [args[index] for index in _LAYING_OUT[target]]
    form = CHANNELS_LAST.get(operands[0].dim())
    strict = [item for item in operands if form is not None and item.is_contiguous(memory_format=form)]
    if form is None or not operands[0].is_cuda or all(item.is_contiguous() for item in strict):
        return result
    laid_out = [
        item if item is None else torch.ops.aten.clone.default(item, memory_format=form)
        for item in ((result,) if target is not _BACKWARD else result[:2])
    ]
    return laid_out[0] if target is not _BACKWARD else (*laid_out, *result[2:])


def known(node: fx.Node, call: Call) -> tuple[bool, Any]:
    """Whether the node was run before by a call that gives the same value, and that value.

    A value that has memory of its own depends on its operands' layouts only. A view shares the memory of this operand,
    and of no other one of its layout.
    """
    kept: _Kept | None = node.meta.get(MARK)
    if kept is None:
        return False, None
    before, aliased, value = kept.call, kept.aliased, kept.value
    same = (
        before.node == call.node
        and before.target is call.target
        and before.mode is call.mode
        and before.arguments == call.arguments
        and before.settings == call.settings
        and len(before.operands) == len(call.operands)
        and all(a is b or (not aliased and _alike(a, b)) for a, b in zip(before.operands, call.operands, strict=True))
    )
    if same:
        if _repeated(before.operands) == _repeated(call.operands):  # what is found of a call depends on no more
            call = dataclasses.replace(call, facts=before.facts)
        node.meta[MARK] = _Kept(call, aliased, value, node.args, node.kwargs)
    return same, value if same else None


def _repeated(operands: tuple[Any, ...]) -> tuple[int, ...]:
    """Which of the operands are the same."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(operand), place) for place, operand in enumerate(operands))


def unchanged(node: fx.Node, values: Mapping[fx.Node, Any], mode: FakeTensorMode) -> tuple[bool, Any]:
    """What `known` says of the node's call, where it holds the very arguments as then, and they the very values."""
    kept: _Kept | None = node.meta.get(MARK)
    if kept is None or kept.args is not node.args or kept.kwargs is not node.kwargs:
        return False, None
    call = kept.call
    if not call.plain or call.node != node.name or call.target is not node.target or call.mode is not mode:
        return False, None
    if call.settings and call.settings != _settings(call.target):
        return False, None
    if kept.operands is None:
        kept.operands = operands_of(node)
    for operand, before in zip(kept.operands, call.operands, strict=True):
        if values[operand] is not before:
            return False, None
    return True, kept.value


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def behind(node: fx.Node) -> Call | None:
    """The call that gave the value that a node has; None where it may make another one by now.

    Nodes whose operands have values of the same layout, and other names, may have one call.
    """
    kept: _Kept | None = node.meta.get(MARK)
    if kept is None or kept.args is not node.args or kept.kwargs is not node.kwargs:
        return None
    return kept.call if kept.call.plain and kept.value is node.meta.get("val") else None


def keep(node: fx.Node, call: Call, value: Any) -> None:
    """Keep the value that a call gave with its node."""
    node.meta[MARK] = _Kept(call, _shares_memory(call.operands, value), value, node.args, node.kwargs)


def copied(node: fx.Node, copy: fx.Node) -> None:
    """What is known of a node is known of a copy that makes the same call of copies of its operands."""
    kept: _Kept | None = node.meta.get(MARK)
    if kept is not None and kept.args is node.args and kept.kwargs is node.kwargs:
        copy.meta[MARK] = _Kept(kept.call, kept.aliased, kept.value, copy.args, copy.kwargs)


def forget(graph: fx.Graph) -> None:
    """Let go of all that was kept with the nodes of a graph."""
    for node in graph.nodes:
        node.meta.pop(MARK, None)


def _alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or not isinstance(a, torch.Tensor):
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    if has_symbols(a) or has_symbols(b):
        return False  # a comparison would be a guard
    return (
        (a.dtype, a.device, a.shape, a.stride(), a.storage_offset())
        == (b.dtype, b.device, b.shape, b.stride(), b.storage_offset())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _shares_memory(operands: Any, value: Any) -> bool:
    """Whether a result lies in an operand's memory, as far as that can be seen; where it cannot, it may."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    given = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, torch.Tensor)]
    if any(leaf.layout is not torch.strided for leaf in (*leaves, *given)):
        return True
    memory = {storage_id(leaf) for leaf in given}
    return any(storage_id(leaf) in memory for leaf in leaves)
