"""Broken and hostile sources: each is one clear line and an exit code, runs no code, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from tests.cli.conftest import assert_one_line
from tests.convert.onnx_models import external, saved, sound

WEIGHTS = {"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4)}
STATE = ("--model", "factories:pair")


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (os.environ["TRACE"],)


def torch_bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def program_bytes() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Flatten(), (torch.ones(2, 3),)), buffer)
    return buffer.getvalue()


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def compressed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record.filename))
    return buffer.getvalue()


def zeros_bomb() -> bytes:
    """A gigabyte of zeros in a megabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with archive.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(64):
                record.write(bytes(2**24))
    return buffer.getvalue()


def changed(edit: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = sound()
    edit(model)
    return model


def deep() -> bytes:
    """Graphs within graphs, deeper than any parser goes."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    content = b""
    for _ in range(500):  # GraphProto.node, NodeProto.attribute, AttributeProto.g
        content = field(1, field(5, field(6, content)))
    return sound().SerializeToString() + field(7, content)


def entry(**values: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **values}}


FILES: dict[str, tuple[bytes | Callable[[], bytes], tuple[str, ...]]] = {
    # torch.save
    "empty.pt": (b"", STATE),
    "text.pt": (b"these are no weights", STATE),
    "magic.pt": (b"PK\x03\x04" + bytes(200), STATE),
    "cut.pt": (lambda: torch_bytes(WEIGHTS)[:-40], STATE),
    "half.pth": (lambda: torch_bytes(WEIGHTS)[:700], STATE),
    "code.pt": (lambda: torch_bytes(Bomb()), STATE),
    "code_within.bin": (lambda: torch_bytes({**WEIGHTS, "extra": Bomb()}), STATE),
    "pickle.pt": (lambda: pickle.dumps(Bomb()), STATE),
    "pickle_no_model.pt": (lambda: pickle.dumps(Bomb()), ()),
    "compressed.pt": (lambda: compressed(torch_bytes(WEIGHTS)), STATE),
    "bomb.pt": (zeros_bomb, STATE),
    "list.pt": (lambda: torch_bytes([1, 2, 3]), STATE),
    "number.pt": (lambda: torch_bytes(7), STATE),
    "nothing.pt": (lambda: torch_bytes({}), STATE),
    "missing.pt": (lambda: torch_bytes({"linear.weight": torch.ones(4, 4)}), STATE),
    "unexpected.pt": (lambda: torch_bytes({**WEIGHTS, "more": torch.ones(1)}), STATE),
    "shape.pt": (lambda: torch_bytes({**WEIGHTS, "linear.bias": torch.ones(5)}), STATE),
    "dtype.pt": (lambda: torch_bytes({**WEIGHTS, "linear.bias": torch.ones(4, dtype=torch.int32)}), STATE),
    "complex.pt": (lambda: torch_bytes({**WEIGHTS, "linear.bias": torch.ones(4, dtype=torch.complex64)}), STATE),
    "other_names.pt": (lambda: torch_bytes({"weight": torch.ones(4, 4)}), STATE),
    "no_model.pt": (lambda: torch_bytes(WEIGHTS), ()),
    "absent.pt": (lambda: torch_bytes(WEIGHTS), ("--model", "factories:absent")),
    "wrong_key.pt": (lambda: torch_bytes({"model": WEIGHTS}), (*STATE, "--key", "ema")),
    # safetensors
    "empty.safetensors": (b"", STATE),
    "text.safetensors": (b"these are no weights at all", STATE),
    "length.safetensors": (lambda: safetensors_bytes({}, length=2**62), STATE),
    "cut.safetensors": (lambda: safetensors_bytes(entry(data_offsets=[0, 400])), STATE),
    "negative.safetensors": (lambda: safetensors_bytes(entry(data_offsets=[-4, 0]), bytes(4)), STATE),
    "dtype.safetensors": (lambda: safetensors_bytes(entry(dtype="F31"), bytes(4)), STATE),
    "shape.safetensors": (lambda: safetensors_bytes(entry(shape=[2**40]), bytes(4)), STATE),
    "json.safetensors": (lambda: safetensors_bytes(b"{" * 100), STATE),
    "names.safetensors": (lambda: safetensors_bytes(entry(), bytes(4)), STATE),
    # torch.export
    "empty.pt2": (b"", ()),
    "text.pt2": (b"no program", ()),
    "cut.pt2": (lambda: program_bytes()[:-100], ()),
    "state.pt2": (lambda: torch_bytes(WEIGHTS), ()),
    "compressed.pt2": (lambda: compressed(program_bytes()), ()),
    "code.pt2": (lambda: pickle.dumps(Bomb()), ()),
    # ONNX
    "empty.onnx": (b"", ()),
    "text.onnx": (b"no graph", ()),
    "zip.onnx": (lambda: torch_bytes(WEIGHTS), ()),
    "cut.onnx": (lambda: sound().SerializeToString()[:-50], ()),
    "no_graph.onnx": (lambda: onnx.ModelProto(ir_version=10).SerializeToString(), ()),
    "deep.onnx": (deep, ()),
    "cycle.onnx": (lambda: changed(lambda m: m.graph.node[0].input.__setitem__(0, "product")).SerializeToString(), ()),
    "undefined.onnx": (lambda: changed(lambda m: m.graph.node[0].input.__setitem__(0, "z")).SerializeToString(), ()),
    "twice.onnx": (lambda: changed(lambda m: m.graph.node[1].output.__setitem__(0, "same")).SerializeToString(), ()),
    "unknown_op.onnx": (lambda: changed(lambda m: setattr(m.graph.node[0], "op_type", "Nop")).SerializeToString(), ()),
    "no_output.onnx": (lambda: changed(lambda m: setattr(m.graph.output[0], "name", "z")).SerializeToString(), ()),
    "opset.onnx": (lambda: changed(lambda m: setattr(m.opset_import[0], "version", 999)).SerializeToString(), ()),
    "huge.onnx": (lambda: sound(rows=2**50).SerializeToString(), ()),
    "lying.onnx": (
        lambda: changed(lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**50)).SerializeToString(),
        (),
    ),
    "type.onnx": (
        lambda: changed(lambda m: setattr(m.graph.initializer[0], "data_type", TensorProto.INT64)).SerializeToString(),
        (),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file(run, folder, monkeypatch, name):
    content, words = FILES[name]
    monkeypatch.setenv("TRACE", str(folder / "code ran"))
    (folder / name).write_bytes(content() if callable(content) else content)
    check(run, folder, name, *words)


def test_there_are_fifty_and_more_of_every_kind():
    suffixes = {"pt", "pth", "bin", "safetensors", "pt2", "onnx"}
    assert {name.rpartition(".")[2] for name in FILES} == suffixes
    kinds = (
        "empty",
        "text",
        "cut",
        "bomb",
        "code",
        "cycle",
        "dtype",
        "shape",
        "missing",
        "unexpected",
        "lying",
        "deep",
    )
    assert all(any(name.startswith(kind) for name in FILES) for kind in kinds)
    assert len(FILES) >= 50


def check(run, folder: Path, source: str, *words: str) -> None:
    before = listing(folder)
    result = run("convert", source, *words, "-o", "out.onnx")
    assert result.exit_code in (1, 2), result.output
    assert_one_line(result, result.exit_code, Path(source).name.split(".")[0])
    assert "Traceback" not in result.stderr
    assert listing(folder) == before


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in str(path))


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "..\\secret", "link"])
def test_onnx_weights_outside_the_folder(run, folder, location):
    (folder / "secret").write_bytes(np.ones(128, np.float32).tobytes())
    (folder / "model").mkdir()
    (folder / "model" / "link").symlink_to(folder / "secret")
    if location == "link":
        path = saved(folder / "model", sound())
        model = onnx.load(path)
        model.graph.initializer[0].ClearField("raw_data")
        model.graph.initializer[0].data_location = TensorProto.EXTERNAL
        model.graph.initializer[0].external_data.add(key="location", value=location)
        saved(folder / "model", model)
    else:
        external(folder / "model", location)
    check(run, folder, "model/in.onnx")


@pytest.mark.parametrize("places", [{"offset": 400}, {"length": 8}, {"offset": -1}])
def test_onnx_weights_that_are_not_where_they_should_be(run, folder, places):
    external(folder, **places)
    check(run, folder, "in.onnx")


CONFIGS = {
    "empty": "",
    "list": "[]",
    "unknown": json.dumps({"model_type": "no-such-model"}),
    "remote_code": json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.M"}}),
    "architecture": json.dumps({"model_type": "bert", "architectures": ["Mine"], "hidden_size": "wide"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_configs(run, folder, monkeypatch, name):
    pytest.importorskip("transformers")
    monkeypatch.setenv("TRACE", str(folder / "code ran"))
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(CONFIGS[name])
    (folder / name / "code.py").write_text("import os\nos.mkdir(os.environ['TRACE'])\n")
    check(run, folder, name)


@pytest.mark.parametrize("kind", ["cut", "pickled", "index"])
def test_hugging_face_weights(run, folder, monkeypatch, kind):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("TRACE", str(folder / "code ran"))
    model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))
    model.save_pretrained(folder / kind)
    weights = folder / kind / "model.safetensors"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "pickled":
        weights.unlink()
        (folder / kind / "pytorch_model.bin").write_bytes(torch_bytes(Bomb()))
    else:
        weights.unlink()
        index = {"metadata": {}, "weight_map": {"wte.weight": "../secret.safetensors"}}
        (folder / kind / "model.safetensors.index.json").write_text(json.dumps(index))
    check(run, folder, kind)
