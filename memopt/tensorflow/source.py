"""A model with named tensors as inputs, captured as rewritten programs at several batch sizes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from memopt.capture.export import from_module
from memopt.convert.emit import tensors
from memopt.convert.key_values import without_cache
from memopt.convert.verify import like
from memopt.pass_manager import Pass, PassManager
from memopt.program import OutputKind, Program
from memopt.torch_compat import pytree

# Batch sizes to capture a model at, besides its example's; a size of one would hide what depends on it.
_CAPTURED = (2, 3, 5)
_TRIED = (1, 4)


class SourceError(ValueError):
    """The model cannot be exported; the message is one line."""


Arguments = Callable[[Mapping[str, torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]


class Called(torch.nn.Module):
    """A model called with its tensors by name: a module of its own, so that it can be copied and widened."""

    def __init__(self, model: torch.nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments
        self.training = model.training

    def forward(self, **inputs: torch.Tensor) -> Any:
        """What the model returns for these tensors."""
        args, kwargs = self.arguments(inputs)
        return self.model(*args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A model and its example inputs.

    Attributes:
        model: the module.
        arguments: positional and keyword arguments of the module, from the tensors by name.
        inputs: the tensors among the example inputs, by name.
    """

    model: torch.nn.Module
    arguments: Arguments
    inputs: Mapping[str, torch.Tensor]

    @classmethod
    def of_module(cls, model: torch.nn.Module, inputs: Mapping[str, Any]) -> Source:
        """A module called with keyword arguments.

        Raises:
            SourceError: there is no tensor among them, or tensors lie within another structure.
        """
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in inputs.items() if name not in given}
        for name, value in rest.items():
            if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                raise SourceError(f"input {name} is of type {type(value).__name__}: only tensors are supported")
        if not given:
            raise SourceError("there is no tensor among the example inputs")
        return cls(model, lambda values: ((), {**rest, **values}), given)

    @classmethod
    def of_exported(cls, exported: ExportedProgram) -> Source:
        """A program of torch.export, with its example inputs.

        Raises:
            SourceError: it has none, or others than tensors.
        """
        args, kwargs = exported.example_inputs or ((), {})
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = [str(name) for name in exported.graph_signature.user_inputs]
        if not leaves or len(leaves) != len(names) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise SourceError("the exported program has no example inputs, or others than tensors: export it again")

        def arguments(values: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            positions, keywords = pytree.tree_unflatten([values[name] for name in names], structure)
            return tuple(positions), dict(keywords)

        return cls(exported.module(), arguments, dict(zip(names, leaves, strict=True)))

    @property
    def function(self) -> Called:
        """The model as a function of the tensors by name."""
        return Called(self.model, self.arguments)

    @property
    def batch(self) -> int | None:
        """The first axis of the first input; None where there is none."""
        first = next(iter(self.inputs.values()))
        return first.shape[0] if first.dim() else None

    def inputs_at(self, batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Inputs like the example's whose first axes, where they are the batch, have another size."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, value in self.inputs.items():
            if not value.dim() or value.shape[0] != self.batch:
                made[name] = value
            else:
                made[name] = like(value.cpu(), (batch, *value.shape[1:]), generator).to(value.device)
        return made

    def program(self, inputs: Mapping[str, torch.Tensor], passes: Sequence[Pass]) -> Program:
        """The model at these shapes, rewritten.

        Raises:
            CaptureError: torch.export cannot capture it.
            PassError: a pass failed, or changed the numbers.
            SourceError: the model changes its own buffers.
        """
        args, kwargs = self.arguments(inputs)
        with self.plain():
            program = from_module(self.model, args, kwargs)
        for output in program.outputs:
            if output.kind is not OutputKind.USER:
                raise SourceError(
                    f"the model changes {output.target or 'an input'} when it runs: put it into eval mode"
                )
        return PassManager(tuple(passes), verify=True).run(program)[0]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the model returns."""
        with torch.no_grad(), self.plain():
            return tensors(self.function(**inputs))

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Let the model return tensors only, while the block runs."""
        with without_cache(self.model):
            yield

    def captured_sizes(self) -> tuple[int, ...]:
        """The batch sizes to capture at, the first one for good; empty without a batch."""
        if self.batch is None:
            return ()
        first = self.batch if self.batch > 1 else _CAPTURED[0]
        return (first, *[size for size in _CAPTURED if size != first][:2])

    def tried_sizes(self) -> tuple[int, ...]:
        """Other batch sizes to run at, one of them captured at nowhere."""
        return tuple(size for size in _TRIED if size != self.batch)
