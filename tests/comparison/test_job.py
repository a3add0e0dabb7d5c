"""What a worker process is told: it survives the file, and what cannot be sent is said in one line."""

import importlib
import json
import sys

import pytest
import torch
from torch import nn

from memopt.comparison.job import Job, Source

FACTORIES = """
import torch

class Net(torch.nn.Linear):
    pass

def pair(size=2):
    return torch.nn.Linear(size, size), (torch.randn(1, size),)

def number():
    return 7

def three():
    return torch.nn.ReLU(), (), ()

def no_model():
    return "net", ()
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "job_factories", raising=False)
    (tmp_path / "job_factories.py").write_text(FACTORIES)
    importlib.invalidate_caches()
    return tmp_path


def test_a_function_makes_the_same_model_every_time(factories):
    source = Source("job_factories:pair", {"size": 3})
    (first, (x,)), _ = source.load(), torch.randn(5)
    again, (y,) = source.load()
    assert torch.equal(first.weight, again.weight) and torch.equal(x, y) and x.shape == (1, 3)


@pytest.mark.parametrize("name", ["number", "three", "no_model"])
def test_a_function_that_returns_something_else(factories, name):
    with pytest.raises(TypeError, match=rf"job_factories:{name} returned \w+: it must return \(model, inputs\)"):
        Source(f"job_factories:{name}").load()


@pytest.mark.parametrize(
    ("function", "error"),
    [("job_factories:absent", AttributeError), ("no_such_module:pair", ModuleNotFoundError)],
)
def test_a_function_that_is_not_there(factories, function, error):
    with pytest.raises(error) as caught:
        Source(function).load()
    assert "\n" not in str(caught.value)


def test_a_model_in_a_file(tmp_path):
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), {"x": torch.randn(4, 2)}
    source = Source.of(model, inputs, tmp_path)
    made, given = source.load()
    assert source.file and not source.function and torch.equal(given["x"], inputs["x"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in made.state_dict().items())


def test_a_model_that_other_processes_cannot_read(tmp_path, factories):
    import job_factories

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_factories.Net, "__module__", "__main__")
        with pytest.raises(ValueError, match=r"^Net is defined in __main__.*package\.module:factory") as caught:
            Source.of(nn.Sequential(job_factories.Net(2, 2)), (), tmp_path)
    assert "\n" not in str(caught.value)
    hooked = nn.ReLU()
    hooked.act = lambda x: x
    with pytest.raises(ValueError, match="the model cannot be sent to another process"):
        Source.of(hooked, (), tmp_path)


def test_a_job_survives_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["a", "b"])
    job = Job(
        Source("m:f", {"size": 3}), "aten:1GB", True, "cuda:1", "bfloat16", "adamw", 1, 2, "v", True, path=("c", "b")
    )
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert sys.path == ["c", "b", "a"], "modules are searched where whoever wrote it did, and each place once"


def test_what_json_cannot_hold_is_found_when_it_is_written(tmp_path):
    with pytest.raises(TypeError):
        Job(Source("m:f", {"x": torch.ones(1)}), "aten", False, "cpu").write(tmp_path / "job.json")
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(json.JSONDecodeError):
        Job.read(tmp_path / "job.json")
