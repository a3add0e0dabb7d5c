from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.capture.export import from_module  # noqa: E402
from memopt.program import Program  # noqa: E402
from memopt.xla.executable import Executable  # noqa: E402
from memopt.xla.pieces import cut  # noqa: E402


class Halves(nn.Module):
    """Of `whole` only the two halves are read, the second one late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.exp()
        first = whole[:, :4].sin()
        for _ in range(3):
            first = first.cos() + 1
        return first * whole[:, 4:]


class Chain(nn.Module):
    """Every result can take the place of its operand; what is read twice, and what is returned, must stay."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        z = y.cos().exp()
        return z + y, y


def program_of(module: nn.Module, *args: torch.Tensor) -> Program:
    return from_module(module.eval(), args)


def run(program: Program, size: int, *args: torch.Tensor, parts: int = 1) -> list[torch.Tensor]:
    executable = Executable(program.graph_module, torch.device("cpu"), size=size, parts=parts)
    given = [program.state[entry.name].clone() if entry.name in program.state else None for entry in program.inputs]
    rest = iter(args)
    return executable([next(rest) if value is None else value for value in given])


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_cut_programs_compute_the_same_and_leave_their_arguments(size: int) -> None:
    x = torch.randn(2, 8)
    before = x.clone()
    for module in (Halves(), Chain()):
        expected = module(x)
        found = run(program_of(module, x), size, x)
        for a, b in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(x, before)


def test_slices_cross_in_place_of_what_they_are_slices_of() -> None:
    pieces = cut(program_of(Halves(), torch.randn(2, 8)).graph_module, 1)
    crossing = {name for piece in pieces for name in piece.writes}
    assert "exp" not in crossing and {"slice_1", "slice_2"} <= crossing


def test_a_result_takes_the_place_of_what_nobody_reads_again() -> None:
    module = program_of(Chain(), torch.randn(64, 64)).graph_module
    memories = Executable(module, torch.device("cpu"), size=1).memories
    # sin is of the caller's x, cos of y, which is returned; exp and the sum may write over their operand.
    assert [one.outputs for one in memories] == [16384, 16384, 0, 0]


@pytest.mark.parametrize("batch", [1, 2, 6, 7])
def test_convolutions_in_parts_of_the_batch(batch: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ConvTranspose2d(6, 4, 2, 2))
    x = torch.randn(batch, 4, 8, 8)
    with torch.no_grad():
        expected = model(x)
    program = program_of(model, x)
    for parts in (1, 4):
        torch.testing.assert_close(run(program, 0, x, parts=parts)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_pooling_in_parts_of_the_batch(batch: int) -> None:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pooled, places = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
            options = ([3, 3], [2, 2], [1, 1], [1, 1], False)
            back = torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, *options, places)
            return pooled, places, back

    x, gradient = torch.randn(batch, 3, 8, 8), torch.randn(batch, 3, 4, 4)
    program = program_of(Pool(), x, gradient)
    for parts in (1, 4):
        for found, expected in zip(run(program, 1, x, gradient, parts=parts), Pool()(x, gradient), strict=True):
            torch.testing.assert_close(found, expected)


def test_parts_hold_less_while_they_run() -> None:
    module = program_of(nn.Conv2d(16, 16, 3, padding=1), torch.randn(16, 16, 32, 32)).graph_module
    cpu = torch.device("cpu")
    whole, parted = (Executable(module, cpu, parts=parts).memories[0].temporaries for parts in (1, 4))
    assert parted < whole / 2
