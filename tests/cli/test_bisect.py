"""`memopt bisect`: from the words to the guilty rewrite."""

import json
import shlex
import sys

import pytest

from tests.cli.conftest import assert_one_line
from tests.convert.onnx_models import saved, sound

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def python(code):
    """A check: Python code that sees the file as `path`."""
    return f"{shlex.quote(sys.executable)} -W ignore -c {shlex.quote(f'import sys; path = sys.argv[1]; {code}')} {{}}"


def test_by_the_numbers(run):
    result = run("bisect", "gpt2:tiny", "--passes", "tests.planted:TWELVE")
    assert result.exit_code == 4 and result.stderr == "error: pass swap_adds breaks the check\n"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("pass swap_adds (7 of 13): output 0: float64 error")
    assert lines[1:5] == [
        "rewrite 4 of 5: swapped add_3",
        "nodes before: add_3",
        "nodes after:  sub_tensor",
        "it fails with this rewrite alone",
    ]
    assert any(line.startswith("+sub_tensor: float32[2, 16, 32] = aten.sub.Tensor(") for line in lines)


def test_nothing_to_find(run):
    result = run("bisect", "factories:pair", "--train", "--format", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"format": "memopt bisection", "version": 1, "found": False}


def test_by_a_command_that_reads_the_files(run, folder):
    (folder / "kept").mkdir()
    # A .pt2 is an archive: its program is in model.json.
    check = python(
        "import zipfile; file = zipfile.ZipFile(path);"
        "(name,) = [n for n in file.namelist() if n.endswith('models/model.json')];"
        "sys.exit(b'aten.sub' in file.read(name))"
    )
    words = (
        "resnet18:tiny",
        "--passes",
        "tests.planted:TWELVE",
        "--check",
        check,
        "--keep",
        "kept",
        "-o",
        "found.json",
    )
    result = run("bisect", *words)
    assert result.exit_code == 4 and result.stdout == ""
    found = json.loads((folder / "found.json").read_text())
    assert found["name"] == "swap_adds" and found["rewrite"]["after"] == ["sub_tensor"]
    names = sorted(path.name for path in (folder / "kept").iterdir())
    assert names[0] == "00_start.pt2" and "13_inplace.pt2" in names and len(names) == found["checks"]


def test_an_onnx_file_by_a_command(run, folder):
    saved(folder, sound())
    check = python("import onnx; sys.exit(sum(n.op_type == 'Identity' for n in onnx.load(path).graph.node) == 0)")
    result = run("bisect", "in.onnx", "--check", check)
    assert result.exit_code == 4 and result.stdout.startswith("pass eliminate_no_ops (1 of ")
    assert "rewrite 1 of 1: Identity copy passes on x" in result.stdout
    assert run("bisect", "in.onnx").exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("gpt7",), 2, "no model 'gpt7'"),
        (("none.onnx",), 2, "no file none.onnx"),
        (("gpt2:tiny", "--check", "true"), 2, "write {}"),
        (("gpt2:tiny", "--keep", "."), 2, "--keep goes with --check"),
        (("gpt2:tiny", "--passes", "nowhere"), 2, "no package.module:TUPLE"),
        (("gpt2:tiny", "--passes", "nowhere.at:ALL"), 2, "cannot import nowhere.at"),
        (("gpt2:tiny", "--passes", "factories:value"), 2, "no tuple of passes"),
        (("gpt2:tiny", "--passes", "memopt.onnx:STANDARD"), 2, "is no Pass, which MODEL needs"),
        (("factories:pair", "--check", "false {}"), 1, "the check fails before any pass: exit code 1"),
        (("factories:pair", "--check", "no-such-command {}"), 1, "--check cannot be run"),
    ],
)
def test_bad_input_is_one_line(run, words, code, expected):
    assert_one_line(run("bisect", *words), code, expected)


def test_broken_onnx_files(run, folder):
    (folder / "bad.onnx").write_bytes(b"no model")
    assert_one_line(run("bisect", "bad.onnx"), 1, "bad.onnx")
    saved(folder, sound())
    assert_one_line(run("bisect", "in.onnx", "--train"), 2, "goes without --train")
