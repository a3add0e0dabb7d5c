"""Passes that remember: what one has made of a program is not made again, to be proved after it was counted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from memopt.pass_manager import Pass, PassResult
from memopt.program import Program


class PassMemo:
    """Stand-ins for passes, each with the results of its pass by program."""

    def __init__(self) -> None:
        """Nothing was run yet."""
        self._kept: dict[int, _Kept] = {}

    def of(self, passes: Iterable[Pass]) -> list[Pass]:
        """The stand-ins for some passes."""
        return [self._kept.setdefault(id(item), _Kept(item)) for item in passes]


class _Kept(Pass):
    def __init__(self, item: Pass) -> None:
        self._item = item
        self._found: WeakKeyDictionary[Program, PassResult] = WeakKeyDictionary()
        self.name, self.tolerance = item.name, item.tolerance  # type: ignore[misc]
        self.lowers_floor = item.lowers_floor  # type: ignore[misc]

    @property
    def key(self) -> str:
        """As its pass has it."""
        return self._item.key

    def run(self, program: Program) -> PassResult:
        """What the pass returns for the program: programs are never edited, so it is the same each time."""
        if program not in self._found:
            started = time.perf_counter()
            result = self._item.run(program)
            if not isinstance(result, PassResult):
                return result  # as it says, whoever runs passes refuses it
            self._found[program] = dataclasses.replace(result, seconds=time.perf_counter() - started)
        return self._found[program]
