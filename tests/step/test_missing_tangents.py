"""Gradients that a loss has not used: zeros that memopt makes, so that none stays where memory runs out."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import output_code

import memopt
from memopt.errors import ShortOfMemoryError
from memopt.step.missing_tangents import Tangent
from tests.inductor.test_peak_lower_bound import needs_compiler

ENGINES = ["aten", pytest.param("inductor", marks=needs_compiler)]


class Several(nn.Module):
    """A loss, and outputs beside it: one that is saved, one that is transposed, one that nothing else is made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = self.first(x)
        value = wide.tanh()
        return (self.second(value) * value).mean(), value, self.third(wide.exp()).t(), wide.sin()


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_are_eagers_whichever_outputs_a_loss_uses(engine: str) -> None:
    model, x = Several(), torch.randn(8, 16, requires_grad=True)
    compiled, wanted = memopt.compile(model, backend=engine), [x, *model.parameters()]
    for used in ((0,), (0, 1), (0, 2, 3), (2,), (1, 3)):

        def loss(outputs: tuple[torch.Tensor, ...], used: tuple[int, ...] = used) -> torch.Tensor:
            return torch.stack([outputs[place].sum() for place in used]).sum()

        total = loss(compiled(x))
        first = torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)
        again = torch.autograd.grad(total, wanted, allow_unused=True)
        eager = torch.autograd.grad(loss(model(x)), wanted, allow_unused=True)
        for mine, second, theirs in zip(first, again, eager, strict=True):
            assert (mine is None) == (theirs is None) == (second is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs)
                torch.testing.assert_close(second, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_stays_of_a_backward_that_memory_ran_out_in(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Several(), torch.randn(8, 16)
    compiled = memopt.compile(model, backend=engine)
    compiled(x)[0].backward()
    made: list[weakref.ref[torch.Tensor]] = []
    plain = Tangent.zeros

    def zeros(tangent: Tangent) -> torch.Tensor:
        if len(made) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        found = plain(tangent)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Tangent, "zeros", zeros)
    loss = compiled(x)[0]
    with pytest.raises(ShortOfMemoryError):
        loss.backward()
    del loss
    gc.collect()
    assert len(made) == 2 and all(reference() is None for reference in made)


def test_zeros_lie_as_the_gradient_does() -> None:
    for like in (torch.ones(3, 4).t(), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(())):
        tangent = Tangent.of(1, like)
        assert tangent is not None and Tangent.of_list(tangent.listed()) == tangent
        found = tangent.zeros()
        assert found.shape == like.shape and found.stride() == like.stride() and not found.any()
    empty = Tangent.of(0, torch.ones(0, 4))
    assert empty is not None and empty.zeros().shape == (0, 4)


def test_of_what_is_no_plain_tensor_of_fixed_sizes_autograd_makes_zeros() -> None:
    assert Tangent.of(0, 3) is None
    assert Tangent.of(0, torch.ones(2, 2).to_sparse()) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_that_runs_in_pieces_is_given_its_zeros_once(engine: str, kept: bool) -> None:
    """Hooks that use gradients within backward have its code run in pieces, each through what fills in zeros."""

    def losses(compiled: bool) -> list[float]:
        model, x = Several(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

        def use(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(use)
        call = memopt.compile(model, backend=engine) if compiled else model
        found = []
        for _ in range(3):
            outputs = call(x)
            if kept:
                outputs[1].sum().backward(retain_graph=True)
            outputs[0].backward()
            found.append(outputs[0].item())
        return found

    torch.testing.assert_close(losses(True), losses(False))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows where Inductor looks how a graph's arguments lie: before 2.13 outside of its code, on a GPU."""
    found = []

    def look(_: object, compiled: Any, *__: object) -> None:
        run = compiled.current_callable

        def aligned(args: list[Any]) -> Any:
            found.append(len(args))
            assert None not in [value for value in args if not isinstance(value, torch.Tensor)]
            return run(args)

        compiled.current_callable = aligned

    monkeypatch.setattr(output_code, "maybe_realign_inputs", look)
    torch._dynamo.reset()
    return found


@needs_compiler
@pytest.mark.quick("True")
@pytest.mark.parametrize("dynamic", [False, True])
def test_zeros_are_there_before_inductor_looks_how_arguments_lie(dynamic: bool, looked: list[int]) -> None:
    """A GPT-2 whose logits are read ended in an AssertionError."""
    model, twin = Several(), Several()
    compiled = memopt.compile(model, backend="inductor", dynamic=dynamic)
    for size in (8, 6):
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
        outputs = compiled(x)
        assert outputs[1].isfinite().all()
        outputs[0].backward()
        twin(x)[0].backward()
        torch.testing.assert_close(model.first.weight.grad, twin.first.weight.grad)
    assert len(looked) >= 4


@needs_compiler
def test_so_they_are_where_code_is_found_on_disk(
    looked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "memopt"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    twin = Several()
    twin(x)[0].backward()
    for _ in range(2):
        torch._dynamo.reset()
        model = Several()
        with caplog.at_level("INFO", logger="memopt"):
            caplog.clear()
            outputs = memopt.compile(model, "1GB", backend="inductor")(x)
        assert outputs[1].isfinite().all()
        outputs[0].backward()
        torch.testing.assert_close(model.first.weight.grad, twin.first.weight.grad)
    assert "warm start" in caplog.text and len(looked) >= 4


@pytest.mark.parametrize("engine", ENGINES)
def test_zeros_have_the_size_of_the_call(engine: str) -> None:
    model, twin = Several(), Several()
    compiled = memopt.compile(model, backend=engine, dynamic=True)
    for size in (8, 6, 10):
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
        compiled(x)[0].backward()
        twin(x)[0].backward()
        assert model.third.weight.grad is None
        torch.testing.assert_close(model.first.weight.grad, twin.first.weight.grad)
