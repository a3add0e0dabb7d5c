import io
import json
import os
import pickle
import zipfile

import pytest
import torch

from memopt.cli.exported import _is_size, load_exported
from memopt.cli.group import CommandError


class Ran(Exception):
    """Code in a file ran."""


def explode():
    raise Ran


class Bomb:
    def __reduce__(self):
        return explode, ()


@pytest.fixture
def program(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten())
    dynamic = ({0: torch.export.Dim("rows"), 1: None},)
    path = tmp_path / "p.pt2"
    torch.export.save(torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=dynamic), path)
    return path


def rewritten(path, edit):
    """The archive with one record after another passed through `edit(name, bytes)`."""
    reader, writer = torch._C.PyTorchFileReader(str(path)), torch._C.PyTorchFileWriter(str(path.parent / "other.pt2"))
    for name in reader.get_all_records():
        data = edit(name, reader.get_record(name))
        if not name.startswith(".data") and name not in ("version", "byteorder"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path.parent / "other.pt2"


def test_an_ordinary_program(program):
    found = load_exported(program)
    assert found.module()(torch.ones(7, 4)).shape == (7, 4)
    assert load_exported(rewritten(program, lambda name, data: data)).module()(torch.ones(7, 4)).shape == (7, 4)


def test_pickled_code_never_runs(program):
    buffer = io.BytesIO()
    torch.save((((Bomb(),), {}),), buffer)

    def edit(name, data):
        return buffer.getvalue() if name.startswith("data/sample_inputs") else data

    bomb = rewritten(program, edit)
    with pytest.raises(
        CommandError, match=r"may run code \(.*sample_inputs.* holds more than tensors\).*--trust-pickle"
    ):
        load_exported(bomb)
    with pytest.raises(CommandError):
        load_exported(bomb, trust_pickle=True)


def test_pickled_weights_are_looked_into(program):
    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)

    def edit(name, data):
        if name.endswith("weights_config.json"):
            content = json.loads(data)
            for entry in content["config"].values():
                entry["use_pickle"] = True
            return json.dumps(content).encode()
        return buffer.getvalue() if name.endswith("weight_0") else data

    with pytest.raises(CommandError, match=r"may run code"):
        load_exported(rewritten(program, edit))


def test_objects_and_libraries_are_refused(program):
    def objects(name, data):
        if not name.endswith("constants_config.json"):
            return data
        return json.dumps({"config": {"c": {"path_name": "opaque_obj_0", "use_pickle": True}}}).encode()

    with pytest.raises(CommandError, match=r"may run code"):
        load_exported(rewritten(program, objects))
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("p/data/aotinductor/model/x.so", b"\x7fELF")
    with pytest.raises(CommandError, match=r"is a compiled library"):
        load_exported(program)


def test_sizes_that_are_code_are_refused(program, tmp_path):
    target = tmp_path / "made"

    def edit(name, data):
        code = f"__import__('os').mkdir('{target}')".encode()
        return data.replace(b"Symbol('", code + b" or Symbol('") if name.endswith("model.json") else data

    with pytest.raises(CommandError, match=r"a size that is no plain formula"):
        load_exported(rewritten(program, edit))
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Symbol('s70', positive=True, integer=True)", True),
        ("Mul(Integer(96), Add(Symbol('s1', integer=True), Integer(-1)))", True),
        ("4*s0 + FloorDiv(s1, 2)", True),
        ("Max(1, s0) >= 2", True),
        ("Symbol('s1); import os')", False),
        ("__import__('os')", False),
        ("s0.__class__", False),
        ("eval(Symbol('x'))", False),
        ("Max('__import__(1)')", False),
        ("sympify(Symbol('x'))", False),
        ("[s0 for s0 in s1]", False),
        ("(lambda: s0)()", False),
        ("s0 +", False),
    ],
)
def test_plain_formulas(text, expected):
    assert _is_size(text) == expected


@pytest.mark.parametrize("content", [b"", b"not a program", b"PK\x03\x04" + bytes(50), pickle.dumps(Bomb())])
def test_junk_is_one_line(tmp_path, content):
    path = tmp_path / "junk.pt2"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=r"junk.pt2 is no program of torch.export") as caught:
        load_exported(path)
    assert "\n" not in caught.value.message


def test_a_truncated_program(program):
    size = os.path.getsize(program)
    for keep in (size - 1, size // 2, 10):
        program.write_bytes(program.read_bytes()[:keep])
        with pytest.raises(CommandError):
            load_exported(program)
