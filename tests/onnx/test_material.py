"""The ONNX package's own material through the standard pipeline: equal to the shipped outputs, or refused by name.

Run as a script, it writes the table beside it and prints the counts.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import onnx
import pytest

from memopt.onnx import ONNXRUNTIME, STANDARD, OnnxPass, fix_initializers, prepare
from memopt.onnx.passes.fold_constants import FoldConstants
from tests.onnx.material import Case, Outcome, check, converted_models, light_models, node_cases, table

TABLE = pathlib.Path(__file__).with_name("material.json")


def sweep_nodes(passes: Sequence[OnnxPass] = STANDARD) -> list[Outcome]:
    return [check(case, passes) for case in node_cases()]


def sweep_light() -> list[Outcome]:
    """Each model as it is, and with its weights constants that may be written out: nearly all of its rewrites."""
    grown = [FoldConstants(growth=1 << 30) if isinstance(item, FoldConstants) else item for item in STANDARD]
    found = []
    for case in light_models():
        found.append(check(case, STANDARD))
        fixed = fix_initializers(prepare(case.model))[0]
        found.append(check(Case(f"{case.name}, fixed", fixed, case.data, case.rtol, case.atol), grown))
    return found


@pytest.mark.slow
def test_node_cases() -> None:
    outcomes = sweep_nodes()
    assert [outcome for outcome in outcomes if outcome.status == "different"] == []
    assert all(outcome.reason for outcome in outcomes if outcome.status == "refused")
    if json.loads(TABLE.read_text())["onnx"] == onnx.__version__:
        recorded = json.loads(TABLE.read_text())["node cases"]
        assert {key: recorded[key] for key in ("cases", "equal", "refused")} == {
            key: table(outcomes)[key] for key in ("cases", "equal", "refused")
        }


@pytest.mark.parametrize("passes", [STANDARD, ONNXRUNTIME], ids=["standard", "onnxruntime"])
def test_converted_models(passes: Sequence[OnnxPass]) -> None:
    outcomes = [check(case, passes, verify=True) for case in converted_models()]
    assert [outcome for outcome in outcomes if outcome.status == "different"] == []
    assert sum(outcome.status == "equal" for outcome in outcomes) > 100


@pytest.mark.parametrize("name", ["light_shufflenet", "light_squeezenet"])
def test_light_models_that_are_small(name: str) -> None:
    (case,) = [case for case in light_models() if case.name == name]
    assert check(case, STANDARD, verify=True).status == "equal"


@pytest.mark.slow
def test_node_cases_with_operators_of_onnx_runtime() -> None:
    assert [outcome for outcome in sweep_nodes(ONNXRUNTIME) if outcome.status == "different"] == []


@pytest.mark.slow
def test_light_models() -> None:
    outcomes = sweep_light()
    assert [outcome.name for outcome in outcomes if outcome.status != "equal"] == []


if __name__ == "__main__":
    result = {
        "onnx": onnx.__version__,
        "node cases": table(sweep_nodes()),
        "node cases, onnxruntime's operators": table(sweep_nodes(ONNXRUNTIME)),
        "light models": table(sweep_light()),
        "converted models": table([check(case, STANDARD) for case in converted_models()]),
    }
    TABLE.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {key: {k: v for k, v in value.items() if k != "refusals"} for key, value in result.items() if key != "onnx"}
        )
    )
