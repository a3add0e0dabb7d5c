"""All that one call of a model does: what it returns and changes, its gradients, and what backward changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from memopt.calls.before_call import BeforeCall, random_states
from memopt.calls.compared import Outcome, other_random
from memopt.calls.held import PLAIN, Held, leaves_of, structure_of
from memopt.capture.facts import facts_of, shared_memory
from memopt.memory.distributed import has_group
from memopt.torch_compat.modules import hooks_after_accumulation
from memopt.torch_compat.storages import is_tracked_view

# Outputs of which gradients are taken alone; of those between the first and the last, whether there are any.
_ALONE = 8

_COMPARED = (torch.Tensor, *PLAIN)

# Writes to something between forward and backward, given the outputs.
Between = Callable[[Sequence[torch.Tensor]], None]


def outcome_of(before: BeforeCall, call: Callable[[], Any], between: Between | None = None) -> Outcome:
    """Run a call and its backward.

    Args:
        before: the state that it begins with.
        call: runs the model.
        between: what a loop writes between forward and backward; the gradients of all outputs are taken then.
    """
    outputs = call()
    leaves = {f"output {index}": leaf for index, leaf in enumerate(leaves_of(outputs))}
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    sources = {name: history.source for name, history in before.histories.items() if history.source is not None}
    ends = _ends(before, tensors)
    if between is not None:
        between(list(tensors.values()))
        return Outcome({}, frozenset(), _gradients(ends, sources), [])
    written = before.written()
    facts: dict[str, Any] = {name: _fact(leaf) for name, leaf in leaves.items() if isinstance(leaf, _COMPARED)}
    facts["what is returned"] = structure_of(outputs)
    for name, tensor in written.items():
        facts[f"{name} after the call"] = facts_of(tensor)
        history = before.histories.get(name)
        facts[f"{name} is the same tensor after the call"] = history is not None and history.tensor is tensor
    values: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    values |= {f"{name} after the call": value.detach().clone() for name, value in written.items()}
    values |= _plain(before, " after the call")
    pairs = shared_memory({**tensors, **written})
    random = random_states()
    values |= _gradients(ends, sources, alone=True)
    values |= _added(before, ends)
    values |= {f"{name} after backward": value.detach().clone() for name, value in _kept(before).items()}
    values |= _plain(before, " after backward")
    later = random_states()
    facts["that backward draws random numbers"] = other_random(random, later)
    shared = frozenset((min(pair), max(pair)) for pair in pairs)
    return Outcome(facts, shared, values, [*random, *later])


def _fact(leaf: Any) -> Any:
    return facts_of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _plain(before: BeforeCall, when: str) -> dict[str, Any]:
    """What modules hold as attributes, but for tensors."""
    held = Held(before.model).values.items()
    return {f"{name}{when}": value for name, value in held if not isinstance(value, torch.Tensor)}


def _kept(before: BeforeCall) -> dict[str, torch.Tensor]:
    """Tensors that backward may write to: those that are neither parameters nor arguments."""
    others = {name for name, _ in before.model.named_parameters()}
    written = before.written().items()
    return {name: value for name, value in written if name not in others and not name.startswith("argument ")}


def _ends(before: BeforeCall, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What has a gradient and came of the call: outputs, what was written to, and what modules hold now."""
    found, known = dict[str, torch.Tensor](), set[int]()
    for name, tensor in {**tensors, **before.written()}.items():
        history = before.histories.get(name)
        came = name in tensors or history is None or history.tensor is not tensor or history.written
        if came and tensor.requires_grad and tensor.grad_fn is not None and id(tensor) not in known:
            found[name] = tensor
            known.add(id(tensor))
    return found


# -- gradients -------------------------------------------------------------------------------------------------------


def _gradients(
    ends: Mapping[str, torch.Tensor], sources: Mapping[str, GradientEdge], *, alone: bool = False
) -> dict[str, Any]:
    """The gradients of all that requires one, by tangents that are random and the same each time.

    Args:
        ends: what they are of.
        sources: what they are asked for.
        alone: whether beside those of all ends together those of single ones are taken: what such a loss does not
            reach has none, rather than zeros. Of those between the first and the last it is told whether there are any.
    """
    if not ends or not sources:
        return dict.fromkeys(f"gradient of {name}" for name in sources)
    wanted, tangents, found = list(sources.values()), _tangents(ends), dict[str, Any]()
    names = list(ends)
    some = {*names[: _ALONE - 1], names[-1]} if alone and len(names) > 1 else set[str]()
    for name in filter(some.__contains__, names):
        by = f" by {name} alone"
        got = _taken([ends[name]], wanted, [tangents[name]])
        if got is None:
            return {}
        for source, gradient in zip(sources, got, strict=True):
            shown = gradient if name in (names[0], names[-1]) or gradient is None else "a tensor"
            found[f"gradient of {source}{by}"] = shown
    got = _taken(list(ends.values()), wanted, list(tangents.values()))
    if got is None:
        return {}
    return found | {f"gradient of {name}": gradient for name, gradient in zip(sources, got, strict=True)}


def _tangents(ends: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for index, (name, end) in enumerate(ends.items()):
        generator = torch.Generator().manual_seed(index)
        tangent = torch.randn(end.shape, generator=generator, dtype=torch.float64)
        found[name] = tangent.to(end.device, end.dtype)
    return found


def _taken(
    ends: Sequence[torch.Tensor], wanted: Sequence[GradientEdge], tangents: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None] | None:
    """Gradients of these ends; None where there are none, as the model has written to what they need.

    Nor are there where it has checkpoints that are entered again: these have `backward()` alone.
    """
    try:
        return torch.autograd.grad(ends, wanted, tangents, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if _is_of_writes(error) or "use_reentrant=True" in str(error):
            return None
        raise


def _is_of_writes(error: RuntimeError) -> bool:
    """Whether the model has written to what gradients need.

    By torch's own bug also where it has written to a view of what has a history: CopySlices asks for too little.
    """
    return "modified by an inplace operation" in str(error) or "should_execute" in str(error)


def _added(before: BeforeCall, ends: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The gradients that `backward()` leaves, added to what there was.

    None are taken where more than gradients would change: by hooks, on other ranks, or in what arguments came of.
    """
    leaves = {name: item.tensor for name, item in before.histories.items() if item.source is not None}
    apart = all(tensor.is_leaf and not hooks_after_accumulation(tensor) for tensor in leaves.values())
    if not ends or not leaves or not apart or has_group():
        return {}
    # What wrote to a view stays in the history of its base, through which later gradients go.
    retain = any(is_tracked_view(tensor) for tensor in ends.values())
    try:
        torch.autograd.backward(list(ends.values()), list(_tangents(ends).values()), retain_graph=retain)
    except RuntimeError as error:
        if not _is_of_writes(error):
            raise
        return {}
    found = ((f"gradient of {name} after backward()", tensor.grad) for name, tensor in leaves.items())
    return {name: None if gradient is None else gradient.detach().clone() for name, gradient in found}
