import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from memopt.convert import write
from memopt.convert.onnx_file import external_files
from memopt.convert.write import remove_leftovers, staged, write_whole
from memopt.onnx.read import weight_bytes


def model(value=1.0, size=100):
    weight = ir.Value(name="w", const_value=ir.tensor(np.full(size, value, np.float32)))
    x = ir.Value(name="x", shape=ir.Shape([size]), type=ir.TensorType(ir.DataType.FLOAT))
    add = ir.node("Add", [x, weight])
    add.outputs[0].name, add.outputs[0].shape, add.outputs[0].type = "y", x.shape, x.type
    graph = ir.Graph([x], [add.outputs[0]], nodes=[add], initializers=[weight], opset_imports={"": 20}, name="g")
    return ir.Model(graph, ir_version=10)


def weight_of(path):
    return onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def test_one_file(tmp_path):
    path = tmp_path / "m.onnx"
    with staged(model(), path) as stage:
        assert isinstance(stage.runnable, bytes)
        assert os.listdir(tmp_path) == []
        stage.commit()
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert stage.file_bytes == path.stat().st_size
    assert weight_of(path)[0] == 1
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_weights_beside(tmp_path):
    path = tmp_path / "m.onnx"
    assert weight_bytes(model()) == 400
    with staged(model(), path, external_above=399) as stage:
        assert weight_of(stage.runnable)[0] == 1
        assert not path.exists()
        stage.commit()
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert external_files(path) == {"m.onnx.data"}
    assert weight_of(path)[0] == 1


def test_replacing_weights_never_touches_the_old_ones_before_the_end(tmp_path):
    path = tmp_path / "m.onnx"
    for value in (1.0, 2.0, 3.0):
        with staged(model(value), path, external_above=0) as stage:
            assert value == 1.0 or weight_of(path)[0] == value - 1
            stage.commit()
        assert weight_of(path)[0] == value
        assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("limit", [0, 10**6])
def test_nothing_is_left_when_it_is_not_committed(tmp_path, limit):
    path = tmp_path / "m.onnx"
    with pytest.raises(RuntimeError, match="no proof"), staged(model(), path, external_above=limit):
        raise RuntimeError("no proof")
    with staged(model(), path, external_above=limit):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("unnamed", [True, False])
def test_whole_files_with_and_without_nameless_ones(tmp_path, monkeypatch, unnamed):
    if not unnamed:
        monkeypatch.setattr(write, "_open_unnamed", lambda folder: None)
    path = tmp_path / "m.bin"
    for payload in (b"first", b"second" * 10_000_000):
        write_whole(path, payload)
        assert path.read_bytes() == payload
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"third")
    assert path.read_bytes() == payload
    assert os.listdir(tmp_path) == ["m.bin"]


def test_leftovers_that_nothing_holds_go_and_others_stay(tmp_path):
    output = tmp_path / "m.onnx"
    names = [".m.onnx.123.a", ".m.onnx.notes.c", ".other.123.d"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".m.onnx.123.file").write_text("part")
    (tmp_path / ".m.onnx.123.link").symlink_to(tmp_path / ".other.123.d")
    with staged(model(), output, external_above=0):
        (mine,) = [name for name in os.listdir(tmp_path) if name.startswith(f".m.onnx.{os.getpid()}.")]
        remove_leftovers(output)
        assert (tmp_path / mine).is_dir()
    assert sorted(os.listdir(tmp_path)) == [".m.onnx.123.link", ".m.onnx.notes.c", ".other.123.d"]


def test_weights_whose_model_never_came_go_with_the_folder_and_those_of_others_stay(tmp_path, monkeypatch):
    output = tmp_path / "m.onnx"
    with staged(model(1.0), output, external_above=0) as stage:
        stage.commit()
    real = os.replace
    monkeypatch.setattr(write.shutil, "rmtree", lambda *args, **kwargs: None)

    def dies(source, target):
        if str(target) == str(output):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", dies)
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt), staged(model(2.0), output, external_above=0) as stage:
        stage.commit()
    monkeypatch.undo()
    assert len(os.listdir(tmp_path)) == 4  # the old model and its weights, new weights, the folder
    remove_leftovers(output)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert weight_of(output)[0] == 1


def test_a_request_to_end_removes_the_temporary_folder(tmp_path):
    script = f"""
import sys, time
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from tests.convert.test_write import model
from memopt.convert.write import staged
with staged(model(), Path({str(tmp_path / "m.onnx")!r}), external_above=0):
    print("staged", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"staged\n"
    assert len(os.listdir(tmp_path)) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    process.stdout.close()
    assert os.listdir(tmp_path) == []
