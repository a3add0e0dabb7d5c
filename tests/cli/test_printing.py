"""--print-after and --print-changed of plan, inspect and convert: on stderr, beside the data on stdout."""

import json

import pytest

from tests.cli.conftest import assert_one_line
from tests.convert.onnx_models import saved, sound

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_plan_shows_what_each_pass_changed(run):
    words = ("plan", "resnet18:tiny", "--inference", "--format", "json", "--budget", "1GB")
    result = run(*words, "--print-changed")
    assert result.exit_code == 0
    report = json.loads(result.stdout)["report"]
    changed = [record["name"] for record in report["passes"] if record["changes"]]
    assert changed and [line[11:] for line in result.stderr.splitlines() if line.startswith("--- before ")] == changed
    assert "\n-_native_batch_norm_legit_no_training: " in result.stderr
    assert "aten.convolution(arg1_1, convolution_folded_weight, convolution_folded_bias, " in result.stderr
    assert run(*words).stderr == ""


def test_inspect_shows_the_graph_after_a_pass(run):
    result = run(
        "inspect", "factories:pair", "--inference", "--print-after", "fuse_conv_bn", "--print-after", "inplace"
    )
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert lines[0] == "# after fuse_conv_bn" and "# after inplace" in lines
    assert sum(line.startswith("output = output(user: ") for line in lines) == 2


def test_a_pass_that_did_not_run(run):
    result = run("inspect", "factories:pair", "--inference", "--print-after", "checkpoint")
    assert result.stderr == "# checkpoint did not run\n"


def test_convert_shows_what_each_pass_changed(run, folder):
    saved(folder, sound())
    result = run("convert", "in.onnx", "--dry-run", "--print-changed", "--print-after", "order_nodes")
    assert result.exit_code == 0
    assert "--- before eliminate_no_ops\n+++ after eliminate_no_ops\n" in result.stderr
    assert "\n-copy: float[rows, 4] = Identity(x)\n" in result.stderr
    assert "# after order_nodes\nx: float[rows, 4] = input 0\n" in result.stderr


@pytest.mark.parametrize(
    ("words", "close"),
    [
        (("plan", "gpt2:tiny"), "did you mean inplace?"),
        (("inspect", "gpt2:tiny"), "there are read_parts, eliminate_copies"),
        (("convert", "gpt2:tiny", "--dry-run"), "there are eliminate_no_ops"),
    ],
)
def test_an_unknown_pass_is_said_before_any_work(run, words, close):
    assert_one_line(run(*words, "--print-after", "in_place"), 2, "no pass 'in_place'", close)
