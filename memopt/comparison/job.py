"""What a worker process is told: which model, on which engine, how often. Plain data in a JSON file."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a process gets the model and its inputs from: a call of a function of a module, or a file.

    Attributes:
        function: `package.module:function`, which returns (model, inputs).
        arguments: its keyword arguments, as JSON can hold them.
        file: a file of torch.save with (model, inputs), written by this package; instead of the function.
    """

    function: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: str = ""

    def load(self) -> tuple[nn.Module, Any]:
        """Make the model and its inputs, with the same random weights every time.

        Raises:
            TypeError: the function that is named gives no model with its inputs.
        """
        torch.manual_seed(0)
        if self.file:
            model, inputs = torch.load(self.file, map_location="cpu", weights_only=False)
            return model, inputs
        module, _, name = self.function.partition(":")
        made = getattr(importlib.import_module(module), name)(**self.arguments)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise TypeError(f"{self.function} returned {type(made).__name__}: it must return (model, inputs)")
        return made

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, folder: Path) -> Source:
        """Keep a model and its inputs in a file for other processes to read.

        Raises:
            ValueError: they cannot be pickled, or not read elsewhere.
        """
        path = folder / "model.pt"
        advice = "give a model that can be pickled, or 'package.module:factory'"
        for kind in map(type, model.modules()):
            if kind.__module__ == "__main__":
                raise ValueError(f"{kind.__name__} is defined in __main__, which other processes lack: {advice}")
        try:
            torch.save((model, inputs), path)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"the model cannot be sent to another process ({error}): {advice}") from error
        return cls(file=str(path))


@dataclasses.dataclass(frozen=True)
class Job:
    """One process's work.

    Attributes:
        source: the model.
        engine: the row's name; empty for the float64 truth.
        training: whether a step has a backward.
        device, dtype: where and in what the model is put; empty dtype: as it is.
        optimizer: its name; empty without one.
        warmup, repeats: steps that are run first, and that are timed.
        values: the file to leave in what the first step computed, or the float64 truth of it.
        eval_gradients: whether to run a step in eval mode with gradients, and time nothing.
        turn: a file; who holds its lock may use much of the device. Empty: others use nothing.
        pauses: a file; see `Pauses`.
        program: what to run, behind Python's name and before that of the job's file; see `serve`.
        more: what else that program is told.
        path: what to search modules on.
    """

    source: Source
    engine: str
    training: bool
    device: str
    dtype: str = ""
    optimizer: str = ""
    warmup: int = 3
    repeats: int = 20
    values: str = ""
    eval_gradients: bool = False
    turn: str = ""
    pauses: str = ""
    program: tuple[str, ...] = ("-m", "memopt.comparison.worker")
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job, and search modules where whoever wrote it did."""
        content = json.loads(path.read_text())
        sys.path[:] = [*dict.fromkeys([*content["path"], *sys.path])]
        lists = {key: tuple(content[key]) for key in ("path", "program")}
        return cls(**{**content, "source": Source(**content["source"]), **lists})
