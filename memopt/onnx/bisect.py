"""Bisection of passes on ONNX graphs: a pass is stopped once it has noted so many rewrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from memopt.difference.bisect import Pipeline, Rewrite, Split, Verdict
from memopt.difference.graph_diff import align
from memopt.difference.unified import unified
from memopt.onnx.edit import Edit
from memopt.onnx.evidence import OnnxEvidenceError, Witness
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.infer import infer_shapes, skeleton
from memopt.onnx.nodes import graph_nodes
from memopt.onnx.samples import Sample, UnknownInput, samples
from memopt.pass_manager import Change


class _Enough(Exception):
    """Stops a pass: as many rewrites as wanted are made."""


class _LimitedEdit(Edit):
    """An edit that ends the pass with its k-th rewrite: a pass notes each one when it is complete."""

    def __init__(self, model: ir.Model, limit: int) -> None:
        super().__init__(model)
        self._limit = limit

    def change(self, summary: str, before: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        super().change(summary, before, after)
        if len(self.changes) >= self._limit:
            raise _Enough


def pipeline(passes: Sequence[OnnxPass]) -> Pipeline[ir.Model]:
    """The passes as bisection takes them."""
    changes: dict[int, tuple[Change, ...]] = {}

    def apply(index: int, model: ir.Model) -> ir.Model:
        result = passes[index].run(model)
        changes[index] = result.changes
        if result.model is not model:
            onnx.checker.check_model(skeleton(result.model, declared=True))
        return result.model

    def splits(index: int, before: ir.Model, after: ir.Model) -> Sequence[Split[ir.Model]]:
        return [_FirstRewrites(passes[index], before, changes[index])]

    return Pipeline([item.name for item in passes], apply, splits)


class _FirstRewrites(Split[ir.Model]):
    def __init__(self, item: OnnxPass, before: ir.Model, changes: tuple[Change, ...]) -> None:
        self.item, self.before, self.changes = item, before, changes

    @property
    def count(self) -> int:
        return len(self.changes)

    def first(self, number: int) -> ir.Model | None:
        if number == 0:
            return self.before
        edit = _LimitedEdit(self.before.clone(), number)
        try:
            self.item.rewrite(edit)
        except _Enough:
            infer_shapes(edit.model)
            try:
                onnx.checker.check_model(skeleton(edit.model, declared=True))
            except onnx.checker.ValidationError:
                return None
            return edit.model
        return None

    def only(self, number: int) -> ir.Model | None:
        return self.first(1) if number == 1 else None

    def describe(self, number: int, alone: bool) -> Rewrite:
        change = self.changes[number - 1]
        before, after = self.first(number - 1), self.first(number)
        text = ""
        if before is not None and after is not None:
            text = unified(align(graph_nodes(before), graph_nodes(after), names=True), "before", "after", 1)
        return Rewrite(change.before, change.after, (change.summary,), number, self.count, alone, text)


class NumbersCheck:
    """Whether a model's results are as near to float64's as the given model's, within a factor."""

    def __init__(
        self, model: ir.Model, inputs: Sequence[Mapping[str, Any]] | None = None, tolerance: float = 16.0
    ) -> None:
        """Run the model as it is.

        Args:
            model: a prepared model, before any pass.
            inputs: arrays by input name, one mapping per run; made up by default.
            tolerance: how many times the error of `model` against float64 an error may reach.

        Raises:
            ValueError: nothing can be compared; the message says why.
        """
        try:
            found = samples(model) if inputs is None else [Sample(dict(feeds), {}) for feeds in inputs]
        except UnknownInput as error:
            raise ValueError(f"the numbers cannot be compared: {error}") from error
        self.witness, self.tolerance = Witness(model, found, len(found) if inputs is not None else 2), tolerance
        if not self.witness.samples:
            raise ValueError(f"the numbers cannot be compared: {'; '.join(self.witness.notes)}")

    def __call__(self, model: ir.Model, stage: str) -> Verdict:
        """Run a model and compare."""
        try:
            self.witness.compare(model, self.tolerance)
        except OnnxEvidenceError as error:
            return Verdict(False, str(error))
        return Verdict(True)
