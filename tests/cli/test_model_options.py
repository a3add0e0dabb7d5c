"""The options that say which model: what they become, and the optimizer that goes with them."""

from __future__ import annotations

import click
import pytest
import torch
from click.testing import CliRunner

from memopt.cli.loading import Request
from memopt.cli.model_options import ModelOptions, model_options


def parse(*words: str) -> ModelOptions:
    found: list[ModelOptions] = []

    @click.command()
    @model_options
    def verb(**options: object) -> None:
        found.append(ModelOptions.from_options(options))

    result = CliRunner().invoke(verb, list(words))
    assert result.exit_code == 0, result.output
    return found[0]


def refused(*words: str) -> bool:
    @click.command()
    @model_options
    def verb(**options: object) -> None:
        raise AssertionError("it ran")

    return CliRunner().invoke(verb, list(words)).exit_code == 2


def test_defaults() -> None:
    expected = Request(spec="gpt2", batch=2, tiny=False, training=True, factory=None, trust_pickle=False, device=None)
    assert parse("gpt2") == ModelOptions(expected, "adamw")


def test_every_option() -> None:
    words = ("w.safetensors", "--model", "a.b:c", "--batch", "7", "--tiny", "--device", "cuda:1", "--trust-pickle")
    found = parse(*words, "--optimizer", "sgd", "--inference")
    assert found.optimizer_name == "sgd"
    assert found.request == Request(
        spec="w.safetensors", batch=7, tiny=True, training=False, factory="a.b:c", trust_pickle=True, device="cuda:1"
    )


@pytest.mark.parametrize("spec", ["model.pt2", "MODEL.PT2"])
def test_exported_programs_are_inference(spec) -> None:
    assert parse(spec).request.training is False


@pytest.mark.parametrize("words", [(), ("gpt2", "--batch", "0"), ("gpt2", "--optimizer", "lbfgs"), ("a", "b")])
def test_usage_errors(words) -> None:
    assert refused(*words)


def test_the_optimizer_holds_what_is_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    for name, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        optimizer = parse("gpt2", "--optimizer", name).optimizer(model)
        assert type(optimizer) is kind
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model[1].parameters()]


@pytest.mark.parametrize("words", [("--inference",), ("--optimizer", "none")])
def test_no_optimizer(words) -> None:
    assert parse("gpt2", *words).optimizer(torch.nn.Linear(2, 2)) is None


def test_no_optimizer_where_nothing_is_trained() -> None:
    assert parse("gpt2").optimizer(torch.nn.Linear(2, 2).requires_grad_(False)) is None
    assert parse("gpt2").optimizer(torch.nn.ReLU()) is None
