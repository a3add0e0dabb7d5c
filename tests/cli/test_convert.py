import io
import json
import os
import resource
import signal
import subprocess
import sys

import click
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from memopt import models
from memopt.cli.convert import steps
from memopt.convert import pipeline
from tests.cli.conftest import assert_one_line, left_in
from tests.convert.conftest import _unmeasured  # noqa: F401
from tests.convert.onnx_models import saved, sound


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def shapes(path):
    loaded = session(path)
    return {entry.name: entry.shape for entry in (*loaded.get_inputs(), *loaded.get_outputs())}


@pytest.mark.quick("resnet18:tiny-*")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2:tiny", {"input_ids": ["batch", "sequence"], "output": ["batch", "sequence", 128]}),
        ("resnet18:tiny", {"images": ["batch", 3, 64, 64], "output": ["batch", 10]}),
    ],
)
def test_model_by_name(run, folder, name, expected):
    result = run("convert", name, "-o", "m.onnx")
    assert (result.exit_code, result.stderr) == (0, "written to m.onnx\n")
    assert result.stdout.startswith(f"{name} → m.onnx (opset 20)\n")
    assert "equal to the source in" in result.stdout.splitlines()[-1]
    onnx.checker.check_model(str(folder / "m.onnx"), full_check=True)
    assert shapes("m.onnx") == expected


def test_factory_with_inputs_as_typed_and_axes_by_place(run, folder):
    (folder / "rows.py").write_text(
        "import torch\n"
        "class Rows(torch.nn.Module):\n"
        "    def forward(self, x, k):\n"
        "        return {'sums': (x * k).sum(1)}\n"
    )
    words = ("rows:Rows", "--input", "x=4x3", "--input", "k=3:float32", "--dynamic", "x:0=rows")
    assert run("convert", *words, "-o", "m.onnx").exit_code == 0
    assert shapes("m.onnx") == {"x": ["rows", 3], "k": [3], "sums": ["rows"]}
    (found,) = session("m.onnx").run(None, {"x": np.ones((7, 3), np.float32), "k": np.full(3, 2, np.float32)})
    assert found.tolist() == [6] * 7


def test_factory_of_a_pair_keeps_its_shapes(run):
    assert run("convert", "factories:pair", "-o", "m.onnx").exit_code == 0
    assert shapes("m.onnx") == {"x": [3, 4], "output": []}


def test_state_dict_with_its_module(run, folder):
    model = torch.nn.Module()
    model.linear = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(model.linear.weight, 0.5)
    torch.save(model.state_dict(), "weights.pt")
    assert run("convert", "weights.pt", "--model", "factories:pair", "-o", "m.onnx").exit_code == 0
    expected = (torch.ones(3, 4) @ model.linear.weight.T + model.linear.bias).relu().sum()
    (found,) = session("m.onnx").run(None, {"x": np.ones((3, 4), np.float32)})
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-6)


def test_ema_weights_of_a_nested_checkpoint_with_a_wrappers_prefix(run, folder):
    weights = {"module.linear.weight": torch.full((4, 4), 2.0), "module.linear.bias": torch.zeros(4)}
    torch.save({"model": {name: value + 1 for name, value in weights.items()}, "ema": weights}, "c.pth")
    assert run("convert", "c.pth", "--model", "factories:pair", "--key", "ema", "-o", "m.onnx").exit_code == 0
    assert session("m.onnx").run(None, {"x": np.ones((3, 4), np.float32)})[0] == 3 * 4 * 8


def test_exported_program_keeps_its_own_sizes(run, folder):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=dynamic), "p.pt2")
    assert run("convert", "p.pt2", "-o", "m.onnx").exit_code == 0
    assert shapes("m.onnx") == {"input": ["input_0", 4], "output": ["input_0", 2]}
    assert_one_line(run("convert", "p.pt2", "-o", "n.onnx", "--dynamic", "batch"), 2, "shapes of its own")


def test_state_dict_for_a_built_in_model(run, folder):
    model = models.build("resnet18:tiny").eval()
    torch.save({"state_dict": model.state_dict()}, "c.bin")
    assert run("convert", "c.bin", "--model", "resnet18:tiny", "-o", "m.onnx").exit_code == 0
    inputs = model.example_inputs(2)
    (found,) = session("m.onnx").run(None, {"images": inputs["images"].numpy()})
    np.testing.assert_allclose(found, model(**inputs).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_onnx_in_onnx_out(run, folder):
    saved(folder, sound())
    result = run("convert", "in.onnx", "-o", "out.onnx")
    assert result.exit_code == 0, result.stderr
    assert "pass eliminate_no_ops: 1 changes, 5 → 4 nodes" in result.stdout
    assert [node.op_type for node in onnx.load("out.onnx").graph.node] == ["MatMul", "Relu"]
    assert_one_line(run("convert", "in.onnx", "-o", "new.onnx", "--dynamic", "batch"), 2, "shapes of its own")
    assert_one_line(run("convert", "no.onnx", "-o", "new.onnx"), 2, "no file no.onnx")
    assert run("convert", "in.onnx", "-o", "typed.onnx", "--input", "x=6x4").exit_code == 0


def test_passes_are_chosen_and_refusals_explained(run, folder):
    saved(folder, sound())
    assert run("convert", "in.onnx", "-o", "same.onnx", "-O", "0").exit_code == 0
    assert (folder / "same.onnx").read_bytes() == (folder / "in.onnx").read_bytes()
    assert run("convert", "in.onnx", "-o", "one.onnx", "--passes", "eliminate_dead").exit_code == 0
    assert len(onnx.load("one.onnx").graph.node) == 4
    assert run("convert", "in.onnx", "-o", "rest.onnx", "--skip", "eliminate_dead").exit_code == 0
    assert "Sqrt" in [node.op_type for node in onnx.load("rest.onnx").graph.node]
    assert_one_line(run("convert", "in.onnx", "-o", "new.onnx", "--skip", "dead"), 2, "no pass 'dead'")
    explained = run("convert", "gpt2:tiny", "--dry-run", "--explain").stdout.splitlines()
    plain = run("convert", "gpt2:tiny", "--dry-run").stdout.splitlines()
    assert any(line.startswith("fold_constants: ") for line in explained)
    assert len(explained) > len(plain)


@pytest.mark.quick("words1")
@pytest.mark.parametrize("words", [("--dtype", "fp16"), ("--dtype", "bf16"), ("--quantize", "int8")])
def test_lower_precision_by_request(run, folder, words):
    saved(folder, sound())
    result = run("convert", "gpt2:tiny", "-o", "m.onnx", *words)
    assert result.exit_code == 0, result.stderr
    assert "% of an output's largest value is allowed" in result.stdout
    assert "% of the source in 4 runs" in result.stdout.splitlines()[-1]
    assert run("convert", "in.onnx", "-o", "n.onnx", *words).exit_code == 0
    refused = run("convert", "in.onnx", "-o", "o.onnx", *words, "--tolerance", "1e-9")
    assert_one_line(refused, 4, "output y is off by")
    assert_one_line(run("convert", "in.onnx", "-o", "o.onnx", "--tolerance", "0.1"), 2, "a tolerance goes with")
    assert not (folder / "o.onnx").exists()


def test_the_operator_set_of_an_onnx_file_by_request(run, folder):
    saved(folder, sound())
    assert run("convert", "in.onnx", "-o", "m.onnx", "--opset", "22").exit_code == 0
    assert onnx.load("m.onnx").opset_import[0].version == 22


def test_reports_as_pages_and_files(run, folder):
    saved(folder, sound())
    for suffix, start in (("html", "<!doctype html>"), ("json", "{"), ("txt", "in.onnx → nothing written")):
        result = run("convert", "in.onnx", "--dry-run", "--report", f"r.{suffix}")
        assert (result.exit_code, result.stderr) == (0, f"written to r.{suffix}\n")
        assert (folder / f"r.{suffix}").read_text().startswith(start)
    page = (folder / "r.html").read_text()
    for expected in ("in.onnx → nothing written", "rows 2", "Identity", "pass eliminate_no_ops: 1 changes", "float"):
        assert expected in page
    assert "https:" not in page
    assert_one_line(run("convert", "in.onnx", "--dry-run", "--report", "r.pdf"), 2, "a report is .html, .json or .txt")
    assert_one_line(run("convert", "in.onnx", "--dry-run", "--report", "r.html"), 2, "r.html exists")


def test_json_holds_the_record(run):
    result = run("convert", "gpt2:tiny", "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["schema"], document["version"]) == ("memopt-conversion", 2)
    record = document["report"]
    assert record["output"] is None
    assert record["inputs"] == [{"name": "input_ids", "dtype": "int64", "shape": ["batch", "sequence"]}]
    assert len(record["runs"]) == 4
    assert record["runs"][0]["sizes"] == {"batch": 2, "sequence": 16}
    assert {"sizes", "outputs", "visible_only"} == set(record["runs"][0])


def test_a_dry_run_writes_nothing(run, folder):
    before = left_in(folder)
    assert run("convert", "factories:pair", "--dry-run").exit_code == 0
    assert left_in(folder) == before


def test_an_existing_file_stays_unless_overwritten(run, folder):
    (folder / "m.onnx").write_text("mine")
    assert_one_line(run("convert", "factories:pair", "-o", "m.onnx"), 2, "m.onnx exists", "--overwrite")
    assert (folder / "m.onnx").read_text() == "mine"
    assert run("convert", "factories:pair", "-o", "m.onnx", "--overwrite").exit_code == 0
    assert shapes("m.onnx")


def test_other_numbers_are_exit_code_4_and_no_file(run, folder, monkeypatch):
    def spoiled(*args):
        model = emit(*args)
        weight = next(value for value in model.graph.initializers.values() if len(value.shape) == 2)
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1.001), name=weight.name)
        return model

    emit = pipeline.emit
    monkeypatch.setattr(pipeline, "emit", spoiled)
    before = left_in(folder)
    assert_one_line(run("convert", "factories:pair", "-o", "m.onnx"), 4, "output output is off by", "from float64")
    assert left_in(folder) == before


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("gpt2:tiny",), 2, "say where to"),
        (("gpt2:tiny", "-o", "m.onnx", "--dry-run"), 2, "not both"),
        (("gpt7", "-o", "m.onnx"), 2, "no model 'gpt7'"),
        (("gpt2:tiny", "-o", "no/m.onnx"), 2, "the folder of no/m.onnx does not exist"),
        (("gpt2:tiny", "-o", "m.onnx", "--input", "x=2y3"), 2, "write NAME=2x3x224x224:float32"),
        (
            ("gpt2:tiny", "-o", "m.onnx", "--input", "y=2x3:int64"),
            2,
            "has no input y: its forward takes input_ids, labels",
        ),
        (("gpt2:tiny", "-o", "m.onnx", "--dynamic", "height"), 2, "no input has an axis height"),
        (("vit_b_16:tiny", "-o", "m.onnx", "--dynamic", "height"), 1, "is fixed at 32"),
        (("gpt2:tiny", "-o", "m.onnx", "--opset", "3"), 2, "--opset"),
        (("factories:Tiny", "-o", "m.onnx"), 2, "add --input NAME=2x16:int64 for each (forward takes x)"),
        (("factories:broken", "-o", "m.onnx"), 1, "no disk"),
        (("gpt2:tiny", "-o", "m.onnx", "--key", "ema"), 2, "--key goes with"),
        (("gpt2:tiny", "-o", "m.onnx", "--task", "fill-mask"), 2, "--task goes with"),
    ],
)
def test_bad_requests_are_one_line_and_leave_nothing(run, folder, words, code, expected):
    before = left_in(folder)
    assert_one_line(run("convert", *words), code, expected)
    assert left_in(folder) == before


def test_what_a_lightning_checkpoint_and_an_old_archive_are_called(run, folder):
    torch.manual_seed(0)
    state = {f"model.{name}": value for name, value in models.build("resnet18", tiny=True).state_dict().items()}
    content = {"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2.0", "hyper_parameters": {"lr": 0.1}}
    for name in ("last.ckpt", "best.pth.tar", "räume mit leer.pth"):
        torch.save(content, folder / name)
        words = ("convert", name, "--model", "resnet18:tiny", "--dry-run", "--no-measure", "--passes", "")
        assert run(*words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-o", "there"), "there is a folder"),
        (("-o", "m.safetensors"), "let its name end in .onnx"),
        (("-o", "m.pt2"), "let its name end in .onnx"),
    ],
)
def test_an_output_that_is_no_onnx_file(run, folder, words, expected):
    (folder / "there").mkdir()
    assert_one_line(run("convert", "resnet18:tiny", *words), 2, expected)
    assert left_in(folder) == ["factories.py", "there"]


def test_files_of_a_folder_say_that_the_folder_is_wanted(run, folder):
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, folder / "bert" / "model.safetensors")
    assert_one_line(run("convert", "bert/config.json", "-o", "m.onnx"), 2, "give the folder that it is in, bert")
    assert_one_line(run("convert", "bert/model.safetensors", "-o", "m.onnx"), 2, "or give its folder, bert")


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(run, folder, monkeypatch):
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and allowed(path, mode))
    monkeypatch.setattr(pipeline, "capture", None)
    assert_one_line(run("convert", "resnet18:tiny", "-o", "m.onnx"), 2, "m.onnx cannot be written: its folder is read")


def test_a_full_disk_is_one_line_and_leaves_nothing(run, folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        result = run("convert", "factories:pair", "-o", "m.onnx", "--no-measure")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert_one_line(result, 1, "m.onnx was not written: File too large")
    assert left_in(folder) == ["factories.py"]


def test_an_interrupt_leaves_nothing(run, folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "verify", interrupted)
    result = run("convert", "factories:pair", "-o", "m.onnx", "--no-measure")
    assert result.exit_code == 1 and "Aborted" in result.stderr
    assert left_in(folder) == ["factories.py"]


def test_without_onnx_all_extras_that_the_source_needs_are_named_at_once(folder):
    """In a process of its own, as a module that is imported cannot be missing."""
    (folder / "saved").mkdir()
    (folder / "saved" / "saved_model.pb").touch()
    (folder / "checkpoint").mkdir()
    sources = {
        "model.keras": "tensorflow",
        "MODEL.H5": "tensorflow",
        "saved": "tensorflow",
        "checkpoint": "onnx,hf",
        "weights.safetensors": "onnx,hf",
        "model.onnx": "onnx",
        "gpt2:tiny": "onnx",
    }
    code = (
        "import sys\n"
        "sys.modules['onnx'] = None\n"
        "from click.testing import CliRunner\n"
        "from memopt.cli import main\n"
        "for source in sys.argv[1:]:\n"
        "    found = CliRunner().invoke(main, ['convert', source, '-o', 'm.onnx'])\n"
        "    print(found.exit_code, found.stderr, end='')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, *sources], capture_output=True, text=True, check=True)
    expected = [f"1 error: converting needs onnx: pip install memopt[{extra}]" for extra in sources.values()]
    assert ended.stdout.splitlines() == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with steps(click.Context(click.Command("x")), "converting m") as begin:
        for step in ("capture", "export"):
            begin(step)
    return stream.getvalue()


def test_steps_are_shown_on_a_terminal_only(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""
    assert "converting m: export" in shown(monkeypatch, Terminal())
