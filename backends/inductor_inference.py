"""Inference programs as Inductor code that reads weights where they lie, on CUDA as one CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memopt.backends.aten import Boxed
from memopt.backends.cuda_graph import Replay
from memopt.backends.fused_convolution import Worth, fuse_convolutions, read_by
from memopt.backends.inputs import UserInputs
from memopt.backends.joined_products import join_products, read_by_products
from memopt.backends.static import Arena, device_of
from memopt.backends.tail import split_tail
from memopt.capture.joint import constants_to_attributes
from memopt.program import Program, draws_numbers

_WORTH = Worth()


class InductorFunction:
    """A program as Inductor code: takes the values of all inputs but constants in a list, which it empties.

    Parameters and buffers are arguments, read where the model keeps them: nothing is held twice. On CUDA all kernels
    are one graph, but for large results (see `memopt.backends.tail`). Calls from several threads take turns.

    Attributes:
        no_graph: why no CUDA graph is used; empty where one is.
    """

    def __init__(self, program: Program, turns: Arena, *, graphs: bool = True, tune: bool = False) -> None:
        """Generate and compile the code; memory is taken at the first call.

        Args:
            program: an inference program.
            turns: what programs that share memory take turns with.
            graphs: on CUDA, replay one CUDA graph.
            tune: let cuDNN try its algorithms before the graph is made.
        """
        self._turns, self._inputs, self._boxed_call = turns, UserInputs(program), True
        program = fused(program, turns.device, _WORTH)
        self._replay: Replay | None = None
        self.no_graph = _reason_against(program, turns.device, graphs)
        split = None if self.no_graph else split_tail(program, _compiled_module)
        self._run = _compiled(program if split is None else split.head)
        if not self.no_graph:
            finish = None if split is None else split.finish
            self._replay = Replay(self._run, self._inputs.positions, finish=finish, tune=tune)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run.

        Raises:
            TypeError: there are more or fewer values than inputs.
            ValueError: an input has another shape, layout, dtype or device than was compiled for.
        """
        values = tuple(args)
        args.clear()
        self._inputs.check(values)
        if self._replay is None:
            return self._run(*values)
        with self._turns.lock:
            self._turns.wait()
            return self._replay(*values)

    def release(self) -> None:
        """Give back what is held between calls; the next call takes it again."""
        if self._replay is not None:
            self._replay.release()


def fused(program: Program, device: torch.device, worth: Worth) -> Program:
    """The program with convolutions as cuDNN fuses them, on CUDA."""
    return join_products(fuse_convolutions(program, worth)) if device.type == "cuda" else program


def watching(program: Program) -> Program:
    """The program, which names the inputs whose present values its code will hold."""
    if device_of(program).type != "cuda":
        return program
    return dataclasses.replace(program, baked=program.baked | read_by(program) | read_by_products(program))


def compile_inference(program: Program, *, graphs: bool = True, tune: bool = False) -> InductorFunction:
    """Compile a program, outside of the tracing that captured it."""
    with unset_fake_temporarily(), torch.no_grad():
        return InductorFunction(program, Arena(device_of(program)), graphs=graphs, tune=tune)


def _reason_against(program: Program, device: torch.device, graphs: bool) -> str:
    if device.type != "cuda" or not graphs:
        return "there is none on this device" if graphs else "none was asked for"
    if any(draws_numbers(node) for node in program.calls):
        return "the program draws random numbers"
    return ""


def _compiled(program: Program) -> Callable[..., Sequence[Any]]:
    return _lowered(constants_to_attributes(program))


def _compiled_module(module: fx.GraphModule) -> Boxed:
    run = _lowered(module)
    return lambda args: run(*args)


def _lowered(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(None), torch.no_grad():
        compiled: Any = inductor.compile_fx(module, inputs)
    return compiled  # type: ignore[no-any-return]
