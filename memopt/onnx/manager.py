"""OnnxPassManager: rewrites of an ONNX graph in order, each one checked and proved on real inputs."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from memopt.graph.record import GraphRecord
from memopt.onnx.evidence import OnnxEvidence, OnnxEvidenceError, Witness
from memopt.onnx.graph_pass import OnnxPass, OnnxPassResult
from memopt.onnx.infer import skeleton
from memopt.onnx.load import prepare
from memopt.onnx.observe import observed
from memopt.onnx.read import graphs, weight_bytes
from memopt.onnx.samples import Sample, UnknownInput, samples
from memopt.onnx.sizes import known_shapes, sizes_of
from memopt.onnx.snapshot import snapshot
from memopt.pass_manager import Change, PassError, Refusal


@dataclasses.dataclass(frozen=True)
class OnnxPassRecord:
    """What one pass did: the material of the report.

    Attributes:
        seconds: wall time of the rewrite alone, without checks and evidence.
        nodes_before, nodes_after: nodes of all graphs.
        bytes_before, bytes_after: bytes of all initializers.
        evidence: the numerical proof; None when nothing changed, verification is off, or nothing can be run.
        notes: what is not proved, and why.
        before, after: the graphs, with memory and work at the sizes of the first set of inputs, where they were
            recorded; one object when nothing changed.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    evidence: OnnxEvidence | None
    notes: tuple[str, ...] = ()
    before: GraphRecord | None = dataclasses.field(default=None, repr=False)
    after: GraphRecord | None = dataclasses.field(default=None, repr=False)


class OnnxPassError(PassError):
    """A pass on an ONNX graph failed, made an invalid model, or changed the numbers beyond what it declares."""


class OnnxPassManager:
    """Runs passes in order. After each one that changed something the model is checked, run and compared."""

    def __init__(
        self,
        passes: Sequence[OnnxPass],
        *,
        verify: bool = True,
        inputs: Sequence[Mapping[str, Any]] | None = None,
        samples: int = 2,
        notify: Callable[[str], None] | None = None,
        record: bool = False,
    ) -> None:
        """Take the passes in order.

        Args:
            passes: instances of OnnxPass.
            verify: run the model before and after each change on the same inputs.
            inputs: arrays by input name, one mapping per run; made up at random, in several shapes, by default.
            samples: how many sets of inputs to make up.
            notify: called with the name of each pass as it begins.
            record: whether the records hold the graphs before and after each pass.

        Raises:
            TypeError: something in `passes` is not an OnnxPass instance.
        """
        for item in passes:
            if not isinstance(item, OnnxPass):
                raise TypeError(f"passes must hold OnnxPass instances, not {item!r}")
        self.passes = tuple(passes)
        self.verify, self.record = verify, record
        self._inputs = None if inputs is None else [Sample(dict(feeds), {}) for feeds in inputs]
        self._count = samples
        self._notify = notify

    def run(
        self, model: onnx.ModelProto | ir.Model, earlier: Sequence[OnnxPassRecord] = ()
    ) -> tuple[ir.Model, tuple[OnnxPassRecord, ...]]:
        """Return the rewritten model and one record per pass. The given model is never edited.

        Args:
            model: what the first pass is given.
            earlier: records of the passes that made it, for the identity of its nodes.

        Raises:
            OnnxModelError: the model cannot be handled.
            OnnxPassError: a pass failed, made an invalid model, or changed the numbers; its name is in the error.
        """
        model = prepare(model)
        witness, notes = self._witness(model)
        records: list[OnnxPassRecord] = []
        models = [model]
        for item in self.passes:
            ran = [record.name for record in records]
            if self._notify is not None:
                self._notify(item.name)
            started = time.perf_counter()
            try:
                result = item.run(model)
            except Exception as error:
                raise OnnxPassError(item.name, ran, f"{type(error).__name__}: {error}") from error
            seconds = time.perf_counter() - started
            if not isinstance(result, OnnxPassResult):
                raise OnnxPassError(item.name, ran, f"returned {type(result).__name__}, not an OnnxPassResult")
            evidence = None
            if result.model is not model:
                try:
                    _check(model, result.model)
                    if witness is not None:
                        evidence = witness.compare(result.model, item.tolerance)
                except (OnnxEvidenceError, onnx.checker.ValidationError) as error:
                    raise OnnxPassError(item.name, ran, str(error)) from error
            models.append(result.model)
            records.append(
                OnnxPassRecord(
                    item.name,
                    seconds,
                    *_sizes(model, result.model),
                    result.changes,
                    result.refusals,
                    evidence,
                    tuple(notes),
                )
            )
            observed(item.name, model, result.model)
            model = result.model
        return model, self._recorded(records, models, earlier) if self.record else tuple(records)

    def _recorded(
        self, records: Sequence[OnnxPassRecord], models: Sequence[ir.Model], earlier: Sequence[OnnxPassRecord]
    ) -> tuple[OnnxPassRecord, ...]:
        """The records with the graphs before and after each pass; `models` are those that the passes saw, in order."""
        if not records:
            return ()
        sizes = sizes_of(models[0], self._feeds(models[0]))
        shapes = known_shapes(models, sizes)
        history = [graph for made in earlier for graph in (made.before, made.after) if graph is not None]
        history.append(snapshot(models[0], history, shapes=shapes))
        found = []
        for record, (before, after) in zip(records, itertools.pairwise(models), strict=True):
            graph = history[-1]
            if after is not before:
                changes = [(change.before, change.after) for change in record.changes]
                history.append(snapshot(after, history, changes, shapes))
            found.append(dataclasses.replace(record, before=graph, after=history[-1]))
        return tuple(found)

    def _feeds(self, model: ir.Model) -> Mapping[str, Any]:
        """The first set of inputs; nothing where inputs cannot be made up."""
        try:
            candidates = samples(model, 1) if self._inputs is None else self._inputs
        except UnknownInput:
            return {}
        return candidates[0].feeds if candidates else {}

    def _witness(self, model: ir.Model) -> tuple[Witness | None, list[str]]:
        if not self.verify:
            return None, ["not compared: verification is off"]
        try:
            candidates = samples(model, self._count) if self._inputs is None else self._inputs
        except UnknownInput as error:
            return None, [f"not compared: {error}"]
        witness = Witness(model, candidates, len(candidates) if self._inputs is not None else self._count)
        return witness, witness.notes


def _sizes(before: ir.Model, after: ir.Model) -> tuple[int, int, int, int]:
    return node_count(before), node_count(after), weight_bytes(before), weight_bytes(after)


def node_count(model: ir.Model) -> int:
    """Nodes of all graphs of the model."""
    return sum(len(graph) for graph in graphs(model))


def _check(before: ir.Model, after: ir.Model) -> None:
    """The rewritten model is called as the one before, and ONNX's checker accepts it."""
    for kind in ("inputs", "outputs"):
        old, new = ([_signature(value) for value in getattr(model.graph, kind)] for model in (before, after))
        if old != new:
            raise OnnxEvidenceError(f"{kind} are others than before: {new}, were {old}")
    onnx.checker.check_model(skeleton(after, declared=True))


def _signature(value: ir.Value) -> tuple[str, str, str]:
    return str(value.name), str(value.type), str(value.shape)
