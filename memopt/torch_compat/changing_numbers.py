"""Python floats that change from call to call, as a schedule sets them: inputs of the graph from the second value on.

Dynamo compiles a frame anew for each value of a float unless it takes it for dynamic, and `dynamic=False`, which keeps
sizes static, keeps floats static as well. It asks `process_automatic_dynamic` for each of them; the answer is changed
here, for floats alone. What cannot be traced with a float as an input (an exponent, a slope) Dynamo compiles anew all
the same, and so it does for integers: then the user is told once. Tried on torch 2.11 and 2.13; where the function is
missing nothing changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import re
from typing import Any

from torch._dynamo.variables import builder

from memopt.common.scoped import scoped

log = logging.getLogger("memopt")

_ASKED = "process_automatic_dynamic"

# Values of one number that are compiled for before the user is told.
_MANY = 8

_current: contextvars.ContextVar[ChangingNumbers | None] = contextvars.ContextVar("memopt_numbers", default=None)


class ChangingNumbers:
    """The numbers that one model's frames were compiled for, by frame and name.

    Attributes:
        model_name: as the user is told it.
    """

    def __init__(self, model_name: str) -> None:
        """No number is known yet.

        Args:
            model_name: as the user is told it.
        """
        self.model_name = model_name
        self._values: dict[tuple[Any, str], set[float]] = {}
        self._constant = False
        self._said: set[str] = set()

    @property
    def often(self) -> str:
        """The number with the most values that were compiled for, as the user would write it; empty without one."""
        key = max(self._values, key=lambda key: len(self._values[key]), default=None)
        return "" if key is None or len(self._values[key]) < _MANY else _readable(key[1])

    @property
    def changed(self) -> tuple[str, ...]:
        """Dynamo's sources of the numbers that were compiled for with more than one value."""
        return tuple(name for (_, name), values in self._values.items() if len(values) > 1)

    def followed(self) -> contextlib.AbstractContextManager[None]:
        """Within: what Dynamo compiles takes floats that have changed as inputs."""
        _install()
        return scoped(_current, self)

    def changes(self, frame: Any, name: str, value: float) -> bool:
        """Whether the number had another value when its frame was compiled before; the value is kept.

        Args:
            frame: the code of the frame.
            name: Dynamo's name of the number's source.
            value: its value now.
        """
        values = self._values.setdefault((frame, name), set())
        values.add(value)
        if len(values) == _MANY and name not in self._said:
            self._said.add(name)
            log.warning(
                "memopt: %s of %s is another number at each call, and each is compiled anew: keep it in a tensor "
                "(a buffer that fill_ changes), or set few values",
                _readable(name),
                self.model_name,
            )
        return len(values) > 1 and (not self._constant or len(values) >= _MANY)

    def make_constant(self) -> bool:
        """Compile for each of a few values from now on, where Dynamo fails with an input; whether any number was one.

        It loses inputs between the graphs of two autograd.Functions: a schedule handed to gradient reversals, say.
        """
        was_input = bool(self.changed) and not self._constant
        self._constant = self._constant or was_input
        return was_input


def _install() -> None:
    """Let Dynamo ask here first; once for the process, and without effect outside of `followed`."""
    real = getattr(builder, _ASKED, None)
    dynamic = getattr(builder, "auto_dynamic", None)
    if real is None or dynamic is None or hasattr(real, "memopt"):
        return

    def process(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        numbers, value = _current.get(), entry.scalar
        if numbers is None or type(value) not in (int, float):
            return real(tx, name, entry, **options)
        if numbers.changes(tx.f_code, name, value) and type(value) is float:
            return dataclasses.replace(entry, scalar=dynamic)
        return real(tx, name, entry, **options)

    process.memopt = True  # type: ignore[attr-defined]
    setattr(builder, _ASKED, process)


def _readable(source: str) -> str:
    """`L['self']._modules['encoder'].scale` → `self.encoder.scale`."""
    text = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", text)
