"""What two calls of a model did, side by side: the first thing in which they differ, but for rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from memopt.capture.facts import Facts, other_fact, other_sharing

# The float64 error of a compiled call may be so many times that of the model's own.
_TIMES = 16
# Units in the last place of the largest value of a tensor, or this part of the largest of its kind, that are rounding.
_ULP, _PART = 64, 1 / 64
# Where there is no float64 reference: square roots of the dtype's unit.
_ROOTS = 4


@dataclasses.dataclass
class Outcome:
    """All that one call did.

    Attributes:
        facts: of the tensors among its outputs and what it may have written to, and plain values.
        shared: pairs of outputs, arguments, parameters and buffers that share memory, by name.
        values: outputs, gradients and what the call and its backward left in the model and its arguments, by name.
        random: the generators' states after it, and after its backward.
    """

    facts: dict[str, Any]
    shared: frozenset[tuple[str, str]]
    values: dict[str, Any]
    random: list[torch.Tensor]


class Unlike(NamedTuple):
    """Names of facts and values that are not compared, and whether random numbers are not."""

    facts: Collection[str] = ()
    values: Collection[str] = ()
    random: bool = False


_NOTHING = Unlike()


def difference_of(
    expected: Outcome, found: Outcome, reference: Outcome | None, *, but: Unlike = _NOTHING
) -> str | None:
    """The first thing in which two calls differ, in one line; None where they do the same.

    Args:
        expected, found: what the model and what was compiled did.
        reference: what the model does in float64, if it has such a call.
        but: names of what is not compared (`unlike`).
    """
    counts = [sum(name.startswith("output ") for name in outcome.facts) for outcome in (expected, found)]
    if counts[0] != counts[1]:
        return f"{counts[1]} outputs, not {counts[0]}"
    for name in sorted((expected.facts.keys() ^ found.facts.keys()).difference(but.facts)):
        return f"{name} is {'missing' if name in expected.facts else 'there'}"
    for name, fact in expected.facts.items():
        if name in but.facts:
            continue
        other = found.facts[name]
        if isinstance(fact, Facts) and isinstance(other, Facts):
            line = other_fact(name, fact, other)
            if line is not None:
                return line
        elif not isinstance(fact, float) and fact != other:
            return f"{name} is {other!r}, and {fact!r} in the model"
    sharing = other_sharing(expected.shared, found.shared)
    if sharing is not None:
        return sharing
    for name in sorted((expected.values.keys() ^ found.values.keys()).difference(but.values)):
        return f"{name} is {'missing' if name in expected.values else 'there'}"
    scale = {kind: _scale(expected, kind) for kind in ("gradient", "")}
    for name, value in expected.values.items():
        if name in but.values:
            continue
        wide = None if reference is None else reference.values.get(name)
        kind = "gradient" if name.startswith("gradient") else ""
        reason = _unequal(value, found.values[name], wide, scale[kind])
        if reason is not None:
            return f"{name} {reason}"
    if not but.random and other_random(expected.random, found.random):
        return "random numbers drawn after the call are others"
    return None


def unlike(one: Outcome, other: Outcome) -> Unlike:
    """What two calls of the model itself, on the same, do not do alike: it cannot be compared."""
    facts = {name for name in one.facts.keys() | other.facts.keys() if one.facts.get(name) != other.facts.get(name)}
    values = set(one.values.keys() ^ other.values.keys())
    for name in one.values.keys() & other.values.keys():
        if _unequal(one.values[name], other.values[name], None, 0.0) is not None:
            values.add(name)
    return Unlike(facts, values, other_random(one.random, other.random))


def other_random(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether generators are in other states."""
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _scale(outcome: Outcome, kind: str) -> float:
    values = [value for name, value in outcome.values.items() if name.startswith(kind)] if kind else []
    return max((_largest(value) for value in values if isinstance(value, torch.Tensor)), default=0.0)


def _largest(value: torch.Tensor) -> float:
    if not value.numel() or not value.is_floating_point():
        return 0.0
    return float(torch.nan_to_num(value.double().abs(), nan=0.0, posinf=0.0).max())


def _unequal(expected: Any, found: Any, reference: Any, scale: float) -> str | None:
    """Why a value is another than the model's; None where rounding explains it."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        if _is_number(expected) and _is_number(found):
            same = math.isclose(expected, found) or (expected != expected and found != found)
        else:
            same = type(expected) is type(found) and expected == found
        return None if same else f"is {_short(found)}, not {_short(expected)}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype} of {list(found.shape)}, not {expected.dtype} of {list(expected.shape)}"
    if same_numbers(expected, found):
        return None
    if not expected.is_floating_point():
        return "has other values"
    a, b = expected.double(), found.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return "is not a number in other places"
    unit = torch.finfo(expected.dtype).eps
    largest = max(_largest(expected), scale * _PART)
    limit, error = _ROOTS * math.sqrt(unit) * largest, _apart(a, b)
    if isinstance(reference, torch.Tensor) and reference.shape == expected.shape:
        limit = _TIMES * _apart(a, reference) + _ULP * unit * largest
        error = _apart(b, reference)
    return None if error <= limit else f"differs by {_apart(a, b):.3g} (its largest value is {_largest(expected):.3g})"


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return _largest(torch.where(a == b, 0.0, a.double() - b.double()))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; what is no number in both is the same."""
    return bool(torch.equal(a, b)) or (
        a.is_floating_point() and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value).splitlines()[0]
