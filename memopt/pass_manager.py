"""Pass, PassResult and PassManager: rewrites run in order, each checked and each with its evidence."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch import fx

from memopt.common.phases import phase
from memopt.evidence import Evidence, EvidenceError, Verification, prove
from memopt.graph.record import GraphRecord
from memopt.graph.rewrite import Refused, forget_inplace
from memopt.graph.snapshot import snapshot
from memopt.graph.weights import versions
from memopt.program import InputKind, Program, ProgramError
from memopt.torch_compat.fx_graphs import is_erased

# Programs that were checked, with what they were then: several passes and proofs are given each.
_CHECKED: WeakKeyDictionary[Program, tuple[object, ...]] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Change:
    """One rewrite that was made.

    Attributes:
        summary: what was done, in one line.
        before: names of the nodes of the old program that it replaced or changed.
        after: names of the nodes of the new program that stand for them; empty when nothing does.
    """

    summary: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One rewrite that was considered and not made: the node, and the reason in plain words."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What a pass returns: a program (the one it was given when nothing changed), and what it did and did not do.

    `seconds` is what that took, where it was done before; None: it was done now.
    """

    program: Program
    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    seconds: float | None = None

    @classmethod
    def of(
        cls, program: Program, new: Program, changes: Iterable[Change], refusals: Iterable[Refusal] = ()
    ) -> PassResult:
        """Of a pass that was given `program` and has edited its copy `new`; without changes that is let go."""
        changes = tuple(changes)
        if changes:
            forget_inplace(new.graph)
            program = new.finish()
        return cls(program, changes, tuple(refusals))


class Pass(abc.ABC):
    """One rewrite. Subclasses state the algebra, the numbered cases and the refusals in their docstring.

    Attributes:
        name: the pass's name in reports and on the command line, in snake case.
        tolerance: 0.0 when results are bitwise equal; else how many times the float64 error of the program before the
            error of the program after may reach (a floor of a few units in the last place is always allowed).
        lowers_floor: whether the rewrite reduces the minimum that a step can be planned for, at a price in time or
            with other rounding: it is then used only where a plan without it does not fit, or is slower.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    lowers_floor: ClassVar[bool] = False

    @property
    def key(self) -> str:
        """What plans name the pass by: its name, and how it is set where that is not as usual."""
        return self.name

    @property
    def others(self) -> tuple[Pass, ...]:
        """The same rewrite set otherwise, for less time and more memory, say: a search may take one in its place."""
        return ()

    @property
    def deeper(self) -> Pass | None:
        """The same rewrite set so that it lowers the minimum further, for more time; None where it cannot be."""
        return None

    @abc.abstractmethod
    def run(self, program: Program) -> PassResult:
        """Return the rewritten program. The one given is never edited: edit `program.copy()`, return its `finish()`."""


def attempt_each(
    nodes: Iterable[fx.Node], rewrite: Callable[[fx.Node], Change | None]
) -> tuple[list[Change], list[Refusal]]:
    """Try a rewrite on each node that is still there when its turn comes; return what changed, and what was refused.

    Args:
        nodes: of a program that is being edited.
        rewrite: makes the rewrite; None where there is none to make. It raises Refused before anything is edited.
    """
    changes: list[Change] = []
    refusals: list[Refusal] = []
    for node in nodes:
        if is_erased(node):
            continue
        try:
            change = rewrite(node)
        except Refused as reason:
            refusals.append(Refusal(node.name, str(reason)))
        else:
            changes += [] if change is None else [change]
    return changes, refusals


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did in one compilation: the material of the report.

    Attributes:
        seconds: wall time of the rewrite alone, without checks and evidence.
        nodes_before, nodes_after: call nodes in the program.
        evidence: the numerical proof; None when nothing changed or verification is off.
        before, after: the graphs, with memory and work, where they were recorded; one object when nothing changed.
        program: which of the compilation's programs it was, counted from 0.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    evidence: Evidence | None
    before: GraphRecord | None = dataclasses.field(default=None, repr=False)
    after: GraphRecord | None = dataclasses.field(default=None, repr=False)
    program: int = 0


class PassError(RuntimeError):
    """A pass failed, broke the program's specification, or changed the numbers beyond what it declares.

    Attributes:
        pass_name: the guilty pass.
    """

    def __init__(self, name: str, earlier: Sequence[str], cause: str) -> None:
        ran = f" (after {', '.join(earlier)})" if earlier else ""
        super().__init__(f"pass {name}{ran}: {cause}")
        self.pass_name = name


class PassManager:
    """Runs passes in order. After each one that changed something the program is checked and the change is proved."""

    def __init__(
        self, passes: Sequence[Pass], verify: Verification = True, *, record: bool = False, available: int | None = None
    ) -> None:
        """Take the passes in order.

        Args:
            passes: instances of Pass.
            verify: True proves each change on its own region, "full" on the whole program as well, False not at all.
            record: whether the records hold the graphs before and after each pass.
            available: the most bytes that the proof of a region may take; None: as `prove` has it.

        Raises:
            TypeError: something in `passes` is not a Pass instance.
        """
        for item in passes:
            if not isinstance(item, Pass):
                raise TypeError(f"passes must hold memopt.Pass instances, not {item!r}")
        self.passes = tuple(passes)
        self.verify, self.record, self.available = verify, record, available

    def run(self, program: Program, earlier: Sequence[PassRecord] = ()) -> tuple[Program, tuple[PassRecord, ...]]:
        """Return the rewritten program and one record per pass.

        Args:
            program: what the first pass is given.
            earlier: records of the passes that made the program, for the identity of its nodes.

        Raises:
            PassError: a pass failed, returned a program that breaks the specification, or changed the numbers.
        """
        given = _checked(program)
        records: list[PassRecord] = []
        history = _graphs(earlier)
        if self.record and self.passes:
            with phase("recording"):
                history.append(snapshot(program, history))
        for item in self.passes:
            ran = [record.name for record in records]
            started = time.perf_counter()
            try:
                result = item.run(program)
            except Exception as error:
                raise PassError(item.name, ran, f"{type(error).__name__}: {error}") from error
            seconds = time.perf_counter() - started
            if not isinstance(result, PassResult):
                raise PassError(item.name, ran, f"returned {type(result).__name__}, not a PassResult")
            if _fingerprint(program) != given:
                raise PassError(item.name, ran, "edited the program that it was given, not a copy")
            evidence = None
            if result.program is not program:
                try:
                    given = _checked(result.program)
                    _same_call(program, result.program)
                    if self.verify:
                        with phase("proving"):
                            evidence = prove(program, result.program, item.tolerance, self.verify, self.available)
                except (ProgramError, EvidenceError) as error:
                    raise PassError(item.name, ran, str(error)) from error
            before = history[-1] if self.record else None
            if self.record and result.program is not program:
                with phase("recording"):
                    history.append(snapshot(result.program, history, [(c.before, c.after) for c in result.changes]))
            records.append(
                PassRecord(
                    item.name,
                    seconds if result.seconds is None else result.seconds,
                    len(program.calls),
                    len(result.program.calls),
                    result.changes,
                    result.refusals,
                    evidence,
                    before,
                    history[-1] if self.record else None,
                )
            )
            program = result.program
        return program, tuple(records)


def _graphs(records: Sequence[PassRecord]) -> list[GraphRecord]:
    """Every graph of the records, in order."""
    return [graph for record in records for graph in (record.before, record.after) if graph is not None]


def _checked(program: Program) -> tuple[object, ...]:
    """The fingerprint of a program, which is checked unless it was before, and is the same as then.

    Raises:
        ProgramError: it breaks the specification.
    """
    found = _fingerprint(program)
    if _CHECKED.get(program) != found:
        program.check()
        _CHECKED[program] = found
    return found


def _fingerprint(program: Program) -> tuple[object, ...]:
    """What an edit in place would change: the graph, its annotations, and the versions of the tensors in state."""
    calls = [
        (
            node,
            node.name,
            node.op,
            node.target,
            node.args,
            node.kwargs,
            id(node.meta.get("val")),
            node.meta.get("inplace"),
            node.meta.get("phase"),
        )
        for node in program.graph.nodes
    ]
    return calls, versions(program.state)


def _same_call(before: Program, after: Program) -> None:
    """The rewritten program is called as the one before: constants are its own affair, all else is not."""
    old, new = (
        ([entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT], program.outputs)
        for program in (before, after)
    )
    if old != new or (before.training, before.forward_outputs) != (after.training, after.forward_outputs):
        raise ProgramError("inputs or outputs are others than before: whoever calls the program would not know")
