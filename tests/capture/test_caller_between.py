"""Functions between the model's call and who takes its loss: those that return what they get pass the question on."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.in_place import compile_in_place, stand_in_of
from tests.capture.test_caller import Wrapper, gradients
from tests.capture.test_loss_alone import LABELS, Model, X


def through(run: Any) -> Any:
    """A wrapper as decorators make them."""

    @functools.wraps(run)
    def around(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch.profiler.record_function("step"):
            out = run(*args, **kwargs)
            return out

    return around


class Precision:
    """As `torch.autocast` around a function, by which a library replaces what the stand-in calls."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def by_wrapper_module(run: Any) -> Any:
    outer = Wrapper(run)
    return lambda *args: outer(*args)


def by_forward(run: Any) -> Any:
    inner = Precision(torch.autocast("cpu", enabled=False)(run.forward.__func__))
    run.forward = types.MethodType(lambda self, *args, **kwargs: inner(self, *args, **kwargs), run)
    return run


def in_place(run: Any) -> Any:
    model = Model()
    compile_in_place(model, "10MB", backend="aten")
    return model


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no places")
@pytest.mark.parametrize("way", [through, by_wrapper_module, by_forward, in_place])
def test_functions_between_that_return_what_they_get_pass_the_question_on(way: Callable[[Any], Any]) -> None:
    run, twin = memopt.compile(Model(), "10MB", backend="aten"), Model()
    called = way(run)
    model = called if way is in_place else run

    def alone(called: Any) -> Any:
        out = called(X, LABELS)
        return out.loss

    def more(called: Any) -> Any:
        out = called(X, LABELS)
        return out.loss + out.logits.sum()

    def compare(take: Callable[[Any], Any]) -> None:
        torch.testing.assert_close(gradients(lambda: take(called), model), gradients(lambda: take(twin), twin))

    compare(alone)
    report = stand_in_of(model).report if way is in_place else run.report
    assert any("nothing else" in note for note in report.notes)
    compare(more)
    compare(alone)


def test_what_a_checkpoint_calls_again_is_planned_alike() -> None:
    model, twin = Model(), Model()
    run = memopt.compile(model, "10MB", backend="aten")

    def step(called: Any) -> Any:
        out = checkpoint(called, X, LABELS, use_reentrant=False)
        return out.loss

    for _ in range(3):
        torch.testing.assert_close(gradients(lambda: step(run), model), gradients(lambda: step(twin), twin))
    assert not any("nothing else" in note for note in run.report.notes)


REPLICATED = """
import gc, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import memopt
from tests.capture.test_loss_alone import LABELS, Model, X

def train(called):
    for _ in range(3):
        out = called(X, LABELS)
        out.loss.backward()

gc.freeze()  # what imports keep is in no collection, as in tests
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
twin = Model()
train(twin)
for looks in (False, True):
    torch._dynamo.reset()
    run = memopt.compile(Model(), "10MB", backend="aten")
    train(DDP(run, find_unused_parameters=looks))
    for mine, eager in zip(run.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, eager.grad)
    print(looks, any("nothing else" in note for note in run.report.notes))
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no places")
def test_replicas_pass_the_question_on_unless_they_look_at_outputs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REPLICATED, str(tmp_path / "store")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == ["False True", "True False"]
