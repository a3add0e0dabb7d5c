import pytest
import torch

from memopt.tensorflow import exchange
from memopt.tensorflow.worker import Folder

TENSORS = {
    "float": torch.randn(3, 4).t(),
    "half": torch.randn(5).bfloat16(),
    "none": torch.empty(0, 3),
    "one": torch.tensor(7),
    "flag": torch.tensor([True, False]),
    "expanded": torch.ones(1).expand(4),
}


def same(found):
    assert list(found) == list(TENSORS)
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_what_is_written_is_read(tmp_path):
    exchange.write(tmp_path, "given", TENSORS)
    same(exchange.read(tmp_path, "given"))


def test_arrays_go_there_and_back(tmp_path):
    pytest.importorskip("ml_dtypes")
    exchange.write(tmp_path, "given", TENSORS)
    arrays = Folder(tmp_path).read("given")
    assert arrays["half"].dtype.name == "bfloat16" and arrays["float"].shape == (4, 3)
    Folder(tmp_path).write("back", arrays)
    same(exchange.read(tmp_path, "back"))
    exchange.write(tmp_path, "empty", {})
    assert Folder(tmp_path).read("empty") == {}
