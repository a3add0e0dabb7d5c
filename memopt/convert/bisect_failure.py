"""Which step is guilty where only the end of the way shows other numbers: the pipeline cut shorter and shorter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import onnx_ir as ir

from memopt.convert.arrays import to_array, to_tensor
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.verify import Expectation, compare_all
from memopt.onnx import OnnxPass, OnnxPassManager
from memopt.onnx.engines import EngineError, Reference
from memopt.onnx.manager import OnnxPassRecord
from memopt.onnx.read import weight_bytes

log = logging.getLogger(__name__)

# The reference evaluator is slow: it is asked about models of less weight only.
_EVALUATED_BYTES = 64 * 2**20


def culprit(
    given: ir.Model,
    pipeline: Sequence[OnnxPass],
    records: Sequence[OnnxPassRecord],
    last: OnnxPassRecord | None,
    check: Callable[[ir.Model], object],
    origin: str,
) -> str:
    """Say which step changes the numbers, in a few words.

    Args:
        given: the graph that the passes were given.
        pipeline: the passes.
        records: of those that ran, in order, repeated ones as often as they ran.
        last: of the step after the passes; None: there is none.
        check: raises DifferenceError for a graph that computes other numbers than the source.
        origin: what is guilty where the graph differs before any pass.
    """
    known = {item.name: item for item in pipeline}
    passes = [known[record.name] for record in records]
    if _differs(given, check):
        return f"no pass is guilty: {origin} differs already"
    if not _differs(_after(given, passes), check):
        return f"guilty is {last.name}" if last else "no pass is guilty: only the written file differs"
    right, wrong = 0, len(passes)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if _differs(_after(given, passes[:middle]), check):
            wrong = middle
        else:
            right = middle
    return f"guilty is pass {passes[right].name} (--skip {passes[right].name} leaves it out)"


def _after(given: ir.Model, passes: Sequence[OnnxPass]) -> ir.Model:
    return OnnxPassManager(passes, verify=False).run(given)[0]


def _differs(model: ir.Model, check: Callable[[ir.Model], object]) -> bool:
    try:
        check(model)
    except DifferenceError:
        return True
    except ConversionError as error:  # what cannot be run is not what is looked for
        log.info("bisecting: %s", error)
    return False


def second_opinion(model: ir.Model, expected: Sequence[Expectation], names: Sequence[str], allowed: float) -> str:
    """What the ONNX package's reference evaluator says of a difference that ONNX Runtime shows, in a few words."""
    if weight_bytes(model) > _EVALUATED_BYTES:
        return f"the reference evaluator was not asked: weights above {_EVALUATED_BYTES} bytes"
    inputs = [str(value.name) for value in model.graph.inputs]
    try:
        engine = Reference(model)
        for item in expected:
            found = engine.run({name: to_array(item.inputs[name]) for name in inputs})
            compare_all(names, [to_tensor(value) for value in found], item.outputs, item.reference, "", allowed)
    except EngineError as error:
        return f"the reference evaluator cannot tell: {error}"
    except DifferenceError:
        return "the reference evaluator says so too"
    return "the reference evaluator finds no difference: ONNX Runtime's kernels are at fault"
