"""A model with less than all that is done to it: what differs from the model itself is the fault of the first stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from memopt.backends.aten import AtenBackend
from memopt.engine import Engine
from memopt.options import Options
from memopt.pass_manager import Pass


class Calls(Protocol):
    """Calls of one model."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model."""


def stages(options: Options, make: Callable[[Options], Calls]) -> list[tuple[str, Callable[..., Any]]]:
    """Calls of the model with less than all that is done to it, the least first: operator by operator, then as code.

    Args:
        options: what was asked for.
        make: the calls of the model, as these options have it.
    """

    def stage(passes: tuple[Pass, ...] | None, engine: Engine) -> Callable[..., Any]:
        plain = dataclasses.replace(options, budget=None, optimizer=None, verify=False, allow=())
        calls = make(dataclasses.replace(plain, engine=engine, passes=passes))
        return lambda *args, **kwargs: calls.run(args, kwargs)

    found = [("captured program", stage((), AtenBackend())), ("passes", stage(options.passes, AtenBackend()))]
    return found if options.engine.exact else [*found, ("emitted code", stage(options.passes, options.engine))]
