import argparse
import os
import zipfile

import numpy as np
import pytest
import torch

from memopt.cli.checkpoint import fit, read_checkpoint
from memopt.cli.group import CommandError


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def state():
    return {name: torch.randn_like(tensor) for name, tensor in Two().state_dict().items()}


def saved(tmp_path, content):
    torch.save(content, tmp_path / "c.pt")
    return tmp_path / "c.pt"


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "nest",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {"state": {}, "lr": 0.1}},
        lambda s: {"model": {"state_dict": s}},
        lambda s: {"model": s, "ema": {name: value + 1 for name, value in s.items()}},
    ],
)
def test_nested_checkpoints(tmp_path, nest):
    weights = state()
    assert_equal(read_checkpoint(saved(tmp_path, nest(weights))), weights)


def test_ema_weights_by_key(tmp_path):
    weights, ema = state(), state()
    path = saved(tmp_path, {"model": weights, "extra": {"ema": ema}})
    assert_equal(read_checkpoint(path, key="extra.ema"), ema)
    with pytest.raises(CommandError, match=r"has nothing at extra.swa: there is ema"):
        read_checkpoint(path, key="extra.swa")
    with pytest.raises(CommandError, match=r"has nothing at a: there is model, extra"):
        read_checkpoint(path, key="a")
    with pytest.raises(CommandError, match=r"holds no state dict .* at extra"):
        read_checkpoint(path, key="extra")


def test_an_unusual_place_is_named(tmp_path):
    with pytest.raises(CommandError, match=r"choose with --key generator or critic"):
        read_checkpoint(saved(tmp_path, {"generator": state(), "critic": state()}))


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [1, 2], {"model": {}}, {1: torch.ones(1)}])
def test_no_weights_anywhere(tmp_path, content):
    with pytest.raises(CommandError, match=r"holds no state dict"):
        read_checkpoint(saved(tmp_path, content))


def test_compressed_archives_are_refused(tmp_path):
    source, bomb = saved(tmp_path, state()), tmp_path / "bomb.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record.filename))
    with pytest.raises(CommandError, match=r"compressed records"):
        read_checkpoint(bomb)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_prefixes_of_wrappers_are_taken_off(tmp_path, prefix):
    weights, model = state(), Two()
    fit(model, {f"{prefix}{name}": value for name, value in weights.items()}, tmp_path, "it")
    assert_equal(model.state_dict(), weights)


def test_a_prefix_that_the_module_has_itself_stays(tmp_path):
    model = torch.nn.Module()
    model.module = Two()
    weights = {f"module.{name}": value for name, value in state().items()}
    fit(model, weights, tmp_path, "it")
    assert_equal(model.state_dict(), weights)


def test_narrow_weights_are_widened(tmp_path):
    model = Two()
    fit(model, {name: value.half() for name, value in state().items()}, tmp_path, "it")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("names", [("first.weight", "second.weight"), ("first.weight",), ("second.weight",)])
def test_tied_weights_stay_tied(tmp_path, names):
    model, weight = Tied(), torch.randn(3, 3)
    fit(model, dict.fromkeys(names, weight), tmp_path, "it")
    assert torch.equal(model.first.weight, weight)
    assert model.first.weight is model.second.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("first.bias"), r"1 missing \(first.bias\)"),
        (lambda s: s.update(extra=torch.ones(1)), r"1 unexpected \(extra\)"),
        (
            lambda s: s.update({"first.weight": torch.ones(4, 5)}),
            r"1 of another shape or type \(first.weight is float32\[4x5\] there, float32\[4x3\] in the module\)",
        ),
        (lambda s: s.update({"first.bias": torch.ones(4, dtype=torch.int8)}), r"1 of .*first.bias is int8\[4\] there"),
        (lambda s: s.clear(), r"4 missing \(first.weight, first.bias, second.weight and 1 more; -v lists them\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    weights, model = state(), Two()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(weights)
    with pytest.raises(CommandError, match=f"c.pt does not fit it: {message}"):
        fit(model, weights, "c.pt", "it")
    assert_equal(model.state_dict(), before)


def test_settings_and_numbers_beside_the_weights_are_data(tmp_path):
    beside = {
        "args": argparse.Namespace(lr=0.1, name="x"), "best": np.float64(0.93), "steps": np.int64(7),
        "random": np.random.default_rng(0).integers(0, 9, 5), "epoch": 3,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }  # fmt: skip
    torch.save({"model": {"weight": torch.ones(2)}, **beside}, tmp_path / "a.pth")
    found = read_checkpoint(tmp_path / "a.pth")
    assert list(found) == ["weight"] and torch.equal(found["weight"], torch.ones(2))


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("hidden", ["beside", "in settings", "in an array"])
def test_code_among_data_never_runs(tmp_path, monkeypatch, hidden):
    monkeypatch.chdir(tmp_path)
    array = np.empty(1, dtype=object)
    array[0] = Code()
    content = {"beside": Code(), "in settings": argparse.Namespace(x=Code()), "in an array": array}[hidden]
    torch.save({"model": {"weight": torch.ones(2)}, "more": content}, "a.pth")
    with pytest.raises(CommandError, match="is not a plain state dict") as error:
        read_checkpoint(tmp_path / "a.pth")
    assert error.value.exit_code == 2 and "--trust-pickle" in error.value.message
    assert not (tmp_path / "ran").exists()
    if hidden == "beside":
        assert "(it holds posix.mkdir)" in error.value.message
