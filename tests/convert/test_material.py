"""The ONNX package's own material through the whole conversion, file to file."""

from collections import Counter

import onnx
import onnx_ir as ir
import pytest

from memopt.convert.errors import ConversionError
from memopt.convert.from_onnx import convert_onnx
from memopt.onnx import prepare
from memopt.onnx.engines import OnnxRuntime, Reference
from tests.onnx.material import _matches, light_models, node_cases


def outcome(case, folder):
    """`as it was`, `equal`, or why not; never larger."""
    given, output = folder / "in.onnx", folder / "out.onnx"
    output.unlink(missing_ok=True)
    model = case.model if isinstance(case.model, onnx.ModelProto) else ir.to_proto(case.model)
    given.write_bytes(model.SerializeToString())
    try:
        record = convert_onnx(given, output)
    except ConversionError as error:
        assert not output.exists()
        return f"refused: {str(error).split(':')[0]}"
    assert output.stat().st_size <= given.stat().st_size, case.name
    if not record.runs:
        assert output.read_bytes() == given.read_bytes(), case.name
        return "as it was"
    for load in (OnnxRuntime, Reference):
        if _matches(load, prepare(model), case) is None:
            assert _matches(load, prepare(onnx.load(output)), case) is None, case.name
            return "equal"
    return "no engine gives the shipped outputs of the shipped model"


def test_shipped_cases_are_equal_or_refused(tmp_path):
    """One in eighty of them; the slow test takes all."""
    outcomes = Counter(outcome(case, tmp_path) for case in list(node_cases())[::80])
    assert set(outcomes) <= {"as it was", "equal", "refused: what was rewritten cannot be compared"}
    assert outcomes["equal"] > 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_shipped_case_is_equal_or_refused(tmp_path):
    outcomes = Counter(outcome(case, tmp_path) for case in (*node_cases(), *light_models()))
    assert set(outcomes) == {"as it was", "equal", "refused: what was rewritten cannot be compared"}
    assert outcomes["equal"] > 200
    assert outcomes["refused: what was rewritten cannot be compared"] < 20
