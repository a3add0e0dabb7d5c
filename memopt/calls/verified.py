"""`verify="full"`: a model's compiled call beside the model itself, from its arguments to all that the call changes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memopt.calls.compared import Outcome, difference_of, same_numbers
from memopt.calls.start import contents_of, refill
from memopt.capture.facts import facts_of, shared_memory
from memopt.capture.overlap import may_overlap
from memopt.common.random_streams import host_state, set_host_state
from memopt.evidence import EvidenceError
from memopt.torch_compat import pytree
from memopt.torch_compat.storages import is_tracked_view

_WRITTEN = (int, float, bool, str, type(None))


class ModelError(EvidenceError):
    """The compiled model computes something else than the model.

    Attributes:
        stage: what makes the difference: "captured program", "passes" or "emitted code".
    """

    def __init__(self, model: str, difference: str, stage: str) -> None:
        super().__init__(
            f"{model} and its {stage} differ: {difference} (torch {torch.__version__}; report it with the model's "
            "forward, and leave memopt out until it is mended)"
        )
        self.stage = stage


class Before:
    """The state of a model, a call's arguments and random numbers, to return to."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what a call may write to."""
        self.model, self.args, self.kwargs = model, args, kwargs
        self.random = _random_states()
        written = _written(model, args, kwargs)
        values = (_once_each(tensor.detach()) for tensor in written.values())
        self._tensors = [(tensor, tensor.clone()) for tensor in values]
        self.histories = {name: _History(tensor) for name, tensor in written.items()}
        self._attributes = [
            (module, {key: (value, contents_of(value)) for key, value in module.__dict__.items()})
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Return to it."""
        for module, attributes in self._attributes:
            for key in module.__dict__.keys() - attributes.keys():
                del module.__dict__[key]
            for key, (value, contents) in attributes.items():
                if contents is not None:
                    refill(value, contents)
                if module.__dict__.get(key, self) is not value:
                    module.__dict__[key] = value
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not same_numbers(tensor, value):
                    tensor.copy_(value)
        for history in self.histories.values():
            history.restore()
        _set_random_states(self.random)


class _History:
    """What a tensor was computed from, to return to after a call that has written to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._node, self._trained = tensor, tensor.grad_fn, tensor.requires_grad
        self._copy = tensor.clone() if self._node is not None and torch.is_grad_enabled() else None
        # What gradients of it are asked of.
        self.source = get_gradient_edge(tensor) if self._trained and torch.is_grad_enabled() else None

    @property
    def written(self) -> bool:
        """Whether it has come of something else since."""
        return self._tensor.grad_fn is not self._node

    def restore(self) -> None:
        if not self.written:
            return
        if not is_tracked_view(self._tensor):
            self._tensor.detach_()
            self._tensor.requires_grad_(self._trained and self._copy is None)
        if self._copy is not None:  # a copy of what has the history has it, too
            with torch.enable_grad():
                self._tensor.copy_(self._copy)
            self._node, self.source = self._tensor.grad_fn, get_gradient_edge(self._tensor)


def verified(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[[], Any],
    compiled: Callable[[], int],
    stages: Callable[[], Sequence[tuple[str, Callable[..., Any]]]],
    draws_alike: bool,
) -> Any:
    """Run a compiled call; where it compiled anything, beside the model itself.

    Args:
        model: as the user gave it.
        args, kwargs: of the call.
        call: runs what is compiled of it.
        compiled: how many graphs were compiled so far.
        stages: for a difference, or random numbers that code draws otherwise: calls of the model with less than all
            that is done to it, each under its name, the least first.
        draws_alike: whether the engine draws the random numbers that the model draws.

    Returns:
        The call's outputs.

    Raises:
        ModelError: the compiled call does something else than the model.
    """
    before, count = Before(model, args, kwargs), compiled()
    outputs = call()
    if compiled() == count:
        return outputs
    held = [outputs]
    del outputs  # what a call holds counts in the next one
    found = _outcome(before, held.pop)
    before.restore()
    expected = _outcome(before, lambda: model(*args, **kwargs))
    found, expected = _as_far(expected, found), _as_far(found, expected)
    before.restore()
    # Engines draw otherwise on devices alone.
    draws = any(not torch.equal(a, b) for a, b in zip(before.random[:-1], expected.random[:-1], strict=True))
    reference = None if draws else _reference(before)
    difference = difference_of(expected, found, reference, numbers=draws_alike or not draws)
    if difference is not None or (draws and not draws_alike):
        for name, run in stages():
            before.restore()
            less = _as_far(expected, _outcome(before, functools.partial(run, *args, **kwargs)))
            other = difference_of(expected, less, reference)
            if other is not None:
                before.restore()
                raise ModelError(type(model).__name__, other, name)
        before.restore()
    if difference is not None:
        raise ModelError(type(model).__name__, difference, "emitted code")
    return call()


# -- one call -----------------------------------------------------------------------------------------------------


def _outcome(before: Before, call: Callable[[], Any]) -> Outcome:
    outputs = call()
    written = _written(before.model, before.args, before.kwargs)
    leaves = {f"output {index}": leaf for index, leaf in enumerate(leaves_of(outputs))}
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    facts = {
        name: facts_of(leaf) if name in tensors else leaf
        for name, leaf in leaves.items()
        if name in tensors or isinstance(leaf, _WRITTEN)
    }
    values: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    values.update({f"{name} after the call": value.detach().clone() for name, value in written.items()})
    values.update(_attributes(before.model))
    random = _random_states()
    shared = frozenset(pair for pair in shared_memory({**tensors, **written}) if pair[0] in tensors)
    sources = {name: history.source for name, history in before.histories.items() if history.source is not None}
    ends = [*tensors.values(), *(written[name] for name, history in before.histories.items() if history.written)]
    values.update(_gradients(ends, sources))
    return Outcome(facts, shared, values, random)


def _as_far(expected: Outcome, found: Outcome) -> Outcome:
    """What was found, without gradients where the other's cannot be had.

    The model may have written to what those of all outputs together need.
    """
    if any(name.startswith("gradient of ") for name in expected.values):
        return found
    values = {name: value for name, value in found.values.items() if not name.startswith("gradient of ")}
    return dataclasses.replace(found, values=values)


def leaves_of(value: Any) -> Iterator[Any]:
    """All leaves of what a model returns, of dataclasses too that torch does not know."""
    for leaf in pytree.tree_leaves(value, is_leaf=dataclasses.is_dataclass):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def _gradients(outputs: Sequence[torch.Tensor], sources: Mapping[str, GradientEdge]) -> dict[str, Any]:
    """The gradients of all that requires one, by tangents that are random and the same each time.

    Beside those of all outputs together, those of the first alone and of the last: what such a loss does not reach has
    none, rather than zeros.
    """
    ends = [tensor for tensor in outputs if tensor.requires_grad and tensor.grad_fn is not None]
    if not ends or not sources:
        return dict.fromkeys(f"gradient of {name}" for name in sources)
    tangents = []
    for index, end in enumerate(ends):
        generator = torch.Generator().manual_seed(index)
        tangent = torch.randn(end.shape, generator=generator, dtype=torch.float64)
        tangents.append(tangent.to(end.device, end.dtype))
    # What wrote to a view stays in the history of its base, through which later gradients go.
    retain = any(is_tracked_view(tensor) for tensor in outputs)
    wanted, found = list(sources.values()), dict[str, Any]()
    alone = {" by the first output": slice(0, 1), " by the last output": slice(-1, None)} if len(ends) > 1 else {}
    try:
        for by, part in {**alone, "": slice(None)}.items():
            keeps = retain or by != ""
            got = torch.autograd.grad(ends[part], wanted, tangents[part], retain_graph=keeps, allow_unused=True)
            found |= {f"gradient of {name}{by}": gradient for name, gradient in zip(sources, got, strict=True)}
    except RuntimeError as error:
        # torch's own bug where a call has written to a view of what has a history: CopySlices asks for too little.
        if "modified by an inplace operation" not in str(error) and "should_execute" not in str(error):
            raise
        return {}
    return found


def _written(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors that a call may write to, or have gradients of, by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found.update(model.named_buffers())
    for index, leaf in enumerate(leaves_of((args, kwargs))):
        if isinstance(leaf, torch.Tensor):
            found[f"argument {index}"] = leaf
    return {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided}


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that modules hold as plain attributes."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}".lstrip(".")] = value.detach().clone()
            elif isinstance(value, _WRITTEN) and not key.startswith("_"):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def _once_each(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that may show elements many times, as `expand` and `unfold` do, which cannot be filled."""
    if not may_overlap(tensor):
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _random_states() -> list[torch.Tensor]:
    """Of the host's CPU, of CUDA devices, and last of Python and NumPy."""
    devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    cuda = (torch.cuda.get_rng_state(index) for index in range(devices))
    return [torch.get_rng_state(), *cuda, torch.frombuffer(bytearray(host_state()), dtype=torch.uint8)]


def _set_random_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:-1]):
        torch.cuda.set_rng_state(state, index)
    set_host_state(states[-1].numpy().tobytes())


def _reference(before: Before) -> Outcome | None:
    """The model's call in float64; None where it has none."""

    def wide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wider = value.double() if value.is_floating_point() else value
        return wider.detach().clone().requires_grad_(value.requires_grad)

    try:
        args, kwargs = pytree.tree_map(wide, (tuple(before.args), dict(before.kwargs)))
        copied = Before(copy.deepcopy(before.model).double(), args, kwargs)
        return _outcome(copied, lambda: copied.model(*args, **kwargs))
    except Exception:  # a model that asks for a dtype has no such call: its numbers are compared as they are
        return None
    finally:
        _set_random_states(before.random)
