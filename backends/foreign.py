"""What engines of other runtimes share: copies of the weights, a load at the first call, and PyTorch's strides."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed
from memopt.capture.watched import Rewrite, Watched
from memopt.program import InputKind, Program
from memopt.torch_compat.boxed import boxed

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)

Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


def weights_of(program: Program) -> tuple[str, ...]:
    """Names of the parameters and buffers whose values are known."""
    return tuple(entry.name for entry in program.inputs if entry.kind in _WEIGHTS and entry.name in program.state)


class ForeignWeights(Watched):
    """As `Watched`, for a runtime that holds weights of its own: a change of any of them makes the function anew."""

    def __init__(
        self,
        program: Program,
        rewrite: Rewrite,
        weights: Collection[str],
        build: Callable[[fx.GraphModule, frozenset[int]], Boxed],
    ) -> None:
        """Take a program, and how to make its function.

        Args:
            program: the program.
            rewrite: makes it anew for new values of its parameters and buffers.
            weights: names of the inputs that the runtime holds.
            build: makes the function of a graph; the positions are those of the weights among its inputs.
        """
        arguments = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
        fixed = frozenset(index for index, entry in enumerate(arguments) if entry.name in weights)

        def watched(program: Program) -> Program:
            return dataclasses.replace(program, baked=program.baked | frozenset(weights))

        super().__init__(watched(program), lambda *known: watched(rewrite(*known)), lambda module: build(module, fixed))


@boxed
class ForeignFunction(abc.ABC):
    """One graph: loaded at its first call, run by the other runtime ever after."""

    def __init__(self, module: fx.GraphModule, fixed: frozenset[int]) -> None:
        """Take the graph, and the positions of the inputs that the runtime holds itself."""
        self.module, self.fixed = module, fixed
        results: Any = module.graph.output_node().args[0]
        self.results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
        self._run: Run | None = None

    @abc.abstractmethod
    def load(self, values: Sequence[Any]) -> Run:
        """Load the graph for inputs like these; return what computes its tensors from all inputs."""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on a list of inputs, which is emptied."""
        values = list(args)
        args.clear()
        if self._run is None:
            # AOTAutograd calls with its own dispatch keys switched off, which torch.export needs: a new thread has all.
            with ThreadPoolExecutor(1) as thread:
                self._run = thread.submit(self.load, values).result()
        found = iter(self._run(values))
        return [laid_out(next(found), like) if isinstance(like, torch.Tensor) else like for like in self.results]


def laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with the strides that PyTorch's own result has."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device).copy_(value)
