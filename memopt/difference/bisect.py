"""Which rewrite broke it: halve the pipeline, then the changes within the guilty pass, down to one.

The search knows nothing of graphs: it is given a pipeline that can be applied up to a pass, and up to a change within
one, and a check. `memopt.difference.bisect_program` and `memopt.onnx.bisect` know graphs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class NothingToFind(Exception):
    """The check passes after all passes."""


class BrokenBefore(Exception):
    """The check fails before any pass; the message says how."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check says: whether it passes, and what it saw, in one line."""

    passed: bool
    words: str = ""


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """The guilty rewrite within a pass.

    Attributes:
        before, after: names of the nodes that it replaced, and of those that stand for them.
        summaries: what the pass itself says of it: its changes of these nodes.
        number, count: which of how many places that the pass changed, from 1.
        alone: whether the check is known to fail with this rewrite alone; otherwise it fails with those before it.
        text: the place before and after, in lines of a unified diff.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    summaries: tuple[str, ...]
    number: int
    count: int
    alone: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The guilty pass, and the rewrite within it.

    Attributes:
        name: of the pass.
        number, count: which of how many passes, from 1.
        words: what the failing check saw.
        rewrite: the single rewrite; None where the pass cannot be taken apart, and `reason` says why.
        reason: why there is no single rewrite; empty where there is one.
        checks: how often the check was run.
    """

    name: str
    number: int
    count: int
    words: str
    rewrite: Rewrite | None
    reason: str
    checks: int


class Split(abc.ABC, Generic[S]):
    """One pass, taken apart into its rewrites in order."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many rewrites there are."""

    @abc.abstractmethod
    def first(self, number: int) -> S | None:
        """What the pass was given, with the first `number` rewrites made; None where they cannot be made alone."""

    @abc.abstractmethod
    def only(self, number: int) -> S | None:
        """What the pass was given, with rewrite `number` (from 1) made alone; None where it cannot be."""

    @abc.abstractmethod
    def describe(self, number: int, alone: bool) -> Rewrite:
        """The rewrite in words."""


@dataclasses.dataclass(frozen=True)
class Pipeline(Generic[S]):
    """Passes, and how to apply one.

    Attributes:
        names: of the passes.
        apply: what pass `index` makes of a subject. An exception is a failure of that pass.
        splits: the ways to take pass `index` apart, given what it was given and what it made; tried in order.
    """

    names: Sequence[str]
    apply: Callable[[int, S], S]
    splits: Callable[[int, S, S], Sequence[Split[S]]]


def bisect(start: S, pipeline: Pipeline[S], check: Callable[[S, str], Verdict]) -> Culprit:
    """Find the first pass after which the check fails, and the rewrite within it.

    Args:
        start: the subject before any pass.
        pipeline: its passes.
        check: told the subject and a short name for this stage of it ("03_fold", "03_fold_17").

    Raises:
        BrokenBefore: the check fails on `start`.
        NothingToFind: the check passes after all passes.
    """
    checked = _Counted(check)
    verdict = checked(start, "00_start")
    if not verdict.passed:
        raise BrokenBefore(verdict.words)
    stages: list[S] = [start]
    crash = ""
    for index in range(len(pipeline.names)):
        try:
            stages.append(pipeline.apply(index, stages[-1]))
        except Exception as error:
            crash = f"{type(error).__name__}: {error}"
            break
    low, high = 0, len(stages) - 1
    verdict = checked(stages[high], _stage(pipeline, high)) if high else verdict
    if verdict.passed:
        if not crash:
            raise NothingToFind
        number = len(stages)
        reason = "the pass raised an error"
        return Culprit(
            pipeline.names[number - 1], number, len(pipeline.names), crash, None, reason, checked.times
        )  # fmt: skip
    words = verdict.words
    while high - low > 1:
        middle = (low + high) // 2
        verdict = checked(stages[middle], _stage(pipeline, middle))
        if verdict.passed:
            low = middle
        else:
            high, words = middle, verdict.words
    rewrite, reason, seen = _within(pipeline, high, stages[low], stages[high], checked)
    return Culprit(
        pipeline.names[high - 1], high, len(pipeline.names), seen or words, rewrite, reason, checked.times
    )  # fmt: skip


class _Counted:
    def __init__(self, check: Callable[[Any, str], Verdict]) -> None:
        self.check, self.times = check, 0

    def __call__(self, subject: Any, stage: str) -> Verdict:
        self.times += 1
        return self.check(subject, stage)


def _stage(pipeline: Pipeline[Any], number: int) -> str:
    return f"{number:02}_{pipeline.names[number - 1]}"


def _within(
    pipeline: Pipeline[S], number: int, before: S, after: S, check: _Counted
) -> tuple[Rewrite | None, str, str]:
    """The guilty rewrite of pass `number`, or why there is none; and what the check saw."""
    reason = "the pass changed only what cannot be taken apart (the order of the nodes, say)"
    best: tuple[Rewrite, str] | None = None
    for split in pipeline.splits(number - 1, before, after):
        found = _guilty(split, _stage(pipeline, number), check)
        if isinstance(found, str):
            reason = found
            continue
        place, words = found
        alone = split.only(place)
        confirmed = alone is not None and not check(alone, f"{_stage(pipeline, number)}_only_{place}").passed
        if confirmed:
            return split.describe(place, True), "", words
        best = best or (split.describe(place, False), words)
    return (best[0], "", best[1]) if best else (None, reason, "")


def _guilty(split: Split[Any], stage: str, check: _Counted) -> tuple[int, str] | str:
    """The rewrite with which the check begins to fail, and what it saw; or why it cannot be told."""
    if not split.count:
        return "the pass changed only what cannot be taken apart (the order of the nodes, say)"
    whole = split.first(split.count)
    verdict = None if whole is None else check(whole, f"{stage}_{split.count}")
    if verdict is None or verdict.passed:
        return "the check fails after the pass, but not after its rewrites one by one"
    low, high, words = 0, split.count, verdict.words
    while high - low > 1:
        middle, subject = _nearest(split, low, high)
        if subject is None:
            return f"its rewrites {low + 1} to {high} can only be made together"
        verdict = check(subject, f"{stage}_{middle}")
        if verdict.passed:
            low = middle
        else:
            high, words = middle, verdict.words
    return high, words


def _nearest(split: Split[Any], low: int, high: int) -> tuple[int, Any]:
    """A number strictly between the two whose first rewrites can be made alone, as near to the middle as can be."""
    middle = (low + high) // 2
    for number in sorted(range(low + 1, high), key=lambda number: abs(number - middle)):
        subject = split.first(number)
        if subject is not None:
            return number, subject
    return middle, None
