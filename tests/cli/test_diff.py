"""`memopt diff`: two models, two ONNX files, two reports."""

import json

import pytest

from tests.cli.conftest import assert_one_line
from tests.convert.onnx_models import saved, sound

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.long
def test_two_models(run):
    result = run("diff", "resnet18:tiny", "resnet18:tiny", "--exit-code")
    assert (result.exit_code, result.stderr) == (0, "") and "the same nodes" in result.stdout
    result = run("diff", "resnet18:tiny", "resnet50:tiny", "--exit-code", "--stat")
    assert result.exit_code == 4 and result.stderr == "error: resnet18:tiny and resnet50:tiny differ\n"
    assert any(line.split() == ["aten.relu", "11", "16"] for line in result.stdout.splitlines())
    assert run("diff", "factories:pair", "factories:one_tensor", "--train").exit_code == 0


def test_two_onnx_files(run, folder):
    saved(folder, sound(), "a.onnx")
    saved(folder, sound(value=3.0), "b.onnx")
    result = run("diff", "a.onnx", "a.onnx", "--exit-code")
    assert result.exit_code == 0
    result = run("diff", "a.onnx", "b.onnx", "--exit-code", "-U", 0)
    assert result.exit_code == 4
    changed = [line for line in result.stdout.splitlines() if line.startswith(("-w", "+w"))]
    assert len(changed) == 2 and all("initializer w  # value" in line for line in changed)
    assert run("convert", "a.onnx", "-o", "c.onnx").exit_code == 0
    result = run("diff", "a.onnx", "c.onnx", "--format", "json")
    assert result.exit_code == 0
    assert {"operator": "Identity", "before": 1, "after": 0} in json.loads(result.stdout)["graphs"][0]["operators"]


def test_two_reports(run, folder):
    for name, words in (("a.json", ()), ("b.json", ("--budget", "95%"))):
        assert run("plan", "gpt2:tiny", "--optimizer", "none", "-o", name, *words).exit_code == 0
    result = run("diff", "a.json", "b.json", "-o", "diff.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "predicted peak" in (folder / "diff.html").read_text()
    assert run("diff", "a.json", "a.json", "--exit-code").exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("a.onnx", "gpt2:tiny"), 2, "an .onnx file is compared with another one, not with gpt2:tiny"),
        (("gpt2:tiny", "b.json"), 2, "a report is compared with another one, not with gpt2:tiny"),
        (("a.onnx", "b.onnx"), 2, "no file a.onnx"),
        (("a.json", "b.json"), 2, "a.json: No such file"),
        (("gpt7", "gpt2"), 2, "no model 'gpt7'"),
        (("gpt2:tiny", "gpt2:tiny", "-o", "no/a.html"), 2, "the folder of no/a.html"),
    ],
)
def test_bad_input_is_one_line(run, words, code, expected):
    assert_one_line(run("diff", *words), code, expected)


def test_broken_files(run, folder):
    (folder / "bad.onnx").write_bytes(b"no model")
    assert_one_line(run("diff", "bad.onnx", "bad.onnx"), 1, "bad.onnx is no ONNX file")
    (folder / "bad.json").write_text("{}")
    assert_one_line(run("diff", "bad.json", "bad.json"), 2, "bad.json", "not a memopt report")
