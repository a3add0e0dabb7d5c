"""Writes the source of a random module line by line; each line is run as it is written, and kept if it is tame."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.modules.running import namespace

MAX_NUMEL, MAX_DIM, MAX_ABS = 600, 4, 20.0


class Writer:
    """The module so far, and the values that its forward has in eager.

    Attributes:
        rng: what everything is drawn from.
        init: lines of `__init__`; `forward`: lines of `forward`, without the return.
        values: names of tensors that later lines may read, oldest first.
        helpers: top-level definitions that the module needs.
        switches: plain attributes that a loop may change, and their values.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.init: list[str] = []
        self.forward: list[str] = []
        self.values: list[str] = []
        self.helpers: dict[str, str] = {}
        self.switches: dict[str, Any] = {}
        self.model = nn.Module()
        self.env: dict[str, Any] = {**namespace(torch.float32), "self": self.model}
        self.count = 0

    # -- drawing ------------------------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def choose(self, options: Any) -> Any:
        return self.rng.choice(list(options))

    def name(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def value(self, name: str) -> Tensor:
        return self.env[name]

    def pick(self, fits: Any = lambda value: True) -> str | None:
        """The name of a float value that fits, mostly one of the latest; None if there is none."""
        found = [name for name in self.values if _allowed(self.value(name), fits)]
        if not found:
            return None
        return self.choose(found[-3:]) if self.chance(0.7) else self.choose(found)

    def dim(self, name: str) -> int:
        return self.rng.randrange(self.value(name).dim())

    # -- writing ------------------------------------------------------------------------------------------------

    def helper(self, name: str, source: str) -> None:
        """Define a top-level class or function once."""
        if name not in self.helpers:
            self.helpers[name] = source
            exec(source, self.env)

    def state(self, line: str) -> None:
        """Write a line of `__init__`."""
        exec(line, self.env)
        self.init.append(line)

    def parameter(self, *shape: int) -> str:
        name = self.name("w")
        self.state(f"self.{name} = nn.Parameter(draw({', '.join(map(str, shape))}, seed={self.count}) * 0.5)")
        return f"self.{name}"

    def buffer(self, *shape: int) -> str:
        name = self.name("b")
        self.state(f"self.register_buffer('{name}', draw({', '.join(map(str, shape))}, seed={self.count}))")
        return f"self.{name}"

    def module(self, source: str) -> str:
        name = self.name("m")
        self.state(f"self.{name} = {source}")
        return f"self.{name}"

    def switch(self, value: Any) -> str:
        name = self.name("a")
        self.state(f"self.{name} = {value!r}")
        self.switches[name] = value
        return f"self.{name}"

    def add(self, line: str, *results: str) -> bool:
        """Run a line (or a block) of forward; keep it if it does not raise and every value stays tame."""
        try:
            exec(line, self.env)
            new = [self.env[name] for name in results]
            tame = all(_tame(value) for value in new) and all(_bounded(self.env[name]) for name in self.values)
        except Exception:  # torch raises errors of many kinds: such a line is not written
            return False
        self.forward.append(line)
        self.values += [name for name, value in zip(results, new, strict=True) if value.is_floating_point() and tame]
        return True

    def let(self, expression: str) -> str | None:
        """Write `vN = expression`; the name, or None if torch refuses it."""
        name = self.name()
        return name if self.add(f"{name} = {expression}", name) else None


def _allowed(value: Tensor, fits: Any) -> bool:
    try:
        return bool(fits(value))
    except RuntimeError:
        return False


def _bounded(value: Tensor) -> bool:
    return value.numel() == 0 or bool(value.detach().abs().max() <= MAX_ABS)


def _tame(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.numel() > MAX_NUMEL or value.dim() > MAX_DIM or value.numel() == 0:
        return False
    return value.dtype == torch.bool or _bounded(value)
