"""Bisection of passes on programs: checked by the numbers against float64, or by the user's own command."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import emit
from memopt.difference.bisect import Pipeline, Rewrite, Split, Verdict
from memopt.difference.graph_diff import align
from memopt.difference.program_nodes import graph_nodes
from memopt.difference.transplant import Cut, Part, Tangled, cut, transplant
from memopt.difference.unified import unified
from memopt.errors import first_line
from memopt.evidence import execute, widen
from memopt.pass_manager import Change, Pass
from memopt.program import InputKind, Program

# Errors below this many units in the last place of the largest value are rounding of any correct program.
_FLOOR_ULP = 64


def pipeline(passes: Sequence[Pass]) -> Pipeline[Program]:
    """The passes as bisection takes them."""
    changes: dict[int, tuple[Change, ...]] = {}

    def apply(index: int, program: Program) -> Program:
        result = passes[index].run(program)
        changes[index] = result.changes
        if result.program is not program:
            result.program.check()
        return result.program

    def splits(index: int, before: Program, after: Program) -> Sequence[Split[Program]]:
        return [
            _Parts(cut(before, after, changes[index], by_name=by_name), changes[index]) for by_name in (True, False)
        ]

    return Pipeline([item.name for item in passes], apply, splits)


@dataclasses.dataclass(frozen=True)
class _Parts(Split[Program]):
    cut: Cut
    changes: tuple[Change, ...]

    @property
    def count(self) -> int:
        return len(self.cut.parts)

    def first(self, number: int) -> Program | None:
        return self._with(self.cut.parts[:number])

    def only(self, number: int) -> Program | None:
        return self._with(self.cut.parts[number - 1 : number])

    def _with(self, chosen: Sequence[Part]) -> Program | None:
        try:
            return transplant(self.cut, chosen)
        except Tangled:
            return None

    def describe(self, number: int, alone: bool) -> Rewrite:
        part = self.cut.parts[number - 1]
        old, new = set(part.before), set(part.after)
        summaries = [
            change.summary for change in self.changes if old & set(change.before) or new & set(change.after)
        ]  # fmt: skip
        shown = self.only(number) or self.first(number)
        text = ""
        if shown is not None:
            text = unified(align(graph_nodes(self.cut.before), graph_nodes(shown), names=True), "before", "after", 1)
        return Rewrite(part.before, part.after, tuple(summaries), number, self.count, alone, text)


class NumbersCheck:
    """Whether a program's results are as near to float64's as those of the program before any pass.

    Results are those of the program as its annotations say: in place where a pass said so.
    """

    def __init__(self, start: Program, values: Sequence[Any], tolerance: float = 16.0) -> None:
        """Run the program as it is, and in float64.

        Args:
            start: the program before any pass.
            values: of all inputs but CONSTANT ones, in order; see `memopt.difference.recorded`.
            tolerance: how many times the error of `start` against float64 an error may reach.
        """
        self.values, self.tolerance = list(values), tolerance
        self.before = self._run(start)
        drawn: dict[str, Any] = {}
        inputs = dict(zip([node.name for node in start.placeholders], self._all(start), strict=True))
        wanted = [node for node in start.output_nodes if isinstance(node, fx.Node)]
        with torch.no_grad():
            torch.manual_seed(0)
            execute(start.calls, inputs, wanted, record=drawn)
            wide = {name: widen(value) for name, value in inputs.items()}
            try:
                found = iter(execute(start.calls, wide, wanted, replay=drawn, wide=True))
            except (RuntimeError, NotImplementedError):  # an operator without a float64 kernel
                found = iter([widen(value) for value in self.before if isinstance(value, torch.Tensor)])
        nodes = start.output_nodes
        self.truth = [next(found) if isinstance(node, fx.Node) else node for node in nodes]

    def __call__(self, program: Program, stage: str) -> Verdict:
        """Run a program and compare."""
        try:
            results = self._run(program)
        except Exception as error:
            return Verdict(False, f"the program does not run: {type(error).__name__}: {first_line(error)}")
        for index, (found, old, truth) in enumerate(zip(results, self.before, self.truth, strict=True)):
            words = self._differs(found, old, truth)
            if words:
                return Verdict(False, f"output {index}: {words}")
        return Verdict(True)

    def _all(self, program: Program) -> list[Any]:
        """Values of all inputs, each with memory of its own."""
        given = iter(self.values)
        values = [
            program.state[entry.name] if entry.kind is InputKind.CONSTANT else next(given) for entry in program.inputs
        ]
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]

    def _run(self, program: Program) -> list[Any]:
        torch.manual_seed(0)
        with torch.no_grad():
            return list(emit(program.graph_module)(self._all(program)))

    def _differs(self, found: Any, old: Any, truth: Any) -> str:
        if not isinstance(old, torch.Tensor) or not isinstance(found, torch.Tensor):
            same = type(found) is type(old) and not isinstance(old, torch.Tensor) and found == old
            return "" if same else f"is {found!r}, was {old!r}"
        if found.dtype != old.dtype or found.shape != old.shape:
            return f"is {found.dtype}{list(found.shape)}, was {old.dtype}{list(old.shape)}"
        if not (old.is_floating_point() or old.is_complex()):
            wrong = int((found != old).sum())
            return f"{wrong} of {old.numel()} values differ" if wrong else ""
        if not torch.equal(found.isfinite(), old.isfinite()):
            return "NaN or infinity in other places than before"
        finite = old.isfinite()
        reference = truth[finite].to(torch.complex128 if old.is_complex() else torch.float64)
        if not reference.numel():
            return ""
        error, usual = (float((value[finite].to(reference.dtype) - reference).abs().max()) for value in (found, old))
        floor = _FLOOR_ULP * torch.finfo(old.dtype).eps * float(reference.abs().max())
        if error <= self.tolerance * usual + floor:
            return ""
        return f"float64 error {error:.3g}, {usual:.3g} before any pass"


def save_program(program: Program, values: Sequence[Any], path: Path) -> None:
    """Write a program as a `.pt2`: a module of the user's inputs and of tangents, whose results are all of its outputs.

    New values of buffers and gradients are results like the others. In-place annotations are not kept.

    Args:
        program: what to write, with its state.
        values: of all inputs but CONSTANT ones, in order; those that are no state become the file's example inputs.
        path: the file.
    """
    given = iter(values)
    known = {entry.name: None if entry.kind is InputKind.CONSTANT else next(given) for entry in program.inputs}
    free = [entry.name for entry in program.inputs if entry.name not in program.state]
    exported = torch.export.export(_Runner(program, free), tuple(known[name] for name in free), strict=False)
    torch.export.save(exported, path)


class _Runner(torch.nn.Module):
    def __init__(self, program: Program, free: Sequence[str]) -> None:
        super().__init__()
        self._program, self._free = program, list(free)
        self._held = {name: f"state_{index}" for index, name in enumerate(program.state)}
        for name, attribute in self._held.items():
            self.register_buffer(attribute, program.state[name])

    def forward(self, *args: Any) -> tuple[Any, ...]:
        given = dict(zip(self._free, args, strict=True))
        values = [
            given[entry.name] if entry.name in given else getattr(self, self._held[entry.name])
            for entry in self._program.inputs
        ]
        graph = fx.Interpreter(self._program.graph_module)
        return tuple(graph.run(*values, enable_io_processing=False))
