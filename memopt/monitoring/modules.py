"""Which of the user's modules run, and what each of them leaves for backward and takes at once.

They are found in the frames of what runs: hooks on modules would have torch.compile compile anew.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from memopt.monitoring.lines import NOWHERE, Place, is_users
from memopt.monitoring.record import ModuleMemory
from memopt.torch_compat.modules import called_module, uncompiled

Called = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Names = tuple[str, ...]


@dataclasses.dataclass
class _Count:
    """What is known of one module, in bytes."""

    kind: str
    held: int = 0
    peak: int = 0


@dataclasses.dataclass
class _Call:
    """A call that runs: its frame and module as numbers, its name, what was there when it began, the most since."""

    key: tuple[int, int]
    name: str
    began: int
    most: int


class ModuleWatch:
    """The modules of which a frame is one, and what is known of each."""

    def __init__(self, called: Called) -> None:
        """No module runs.

        Args:
            called: is called with each call of a module that no other one calls: the module, its arguments.
        """
        self._called = called
        self._running: list[_Call] = []
        self._counts: dict[str, _Count] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._models: Counter[str] = Counter()  # by class, how many outermost modules there were

    def look(self, frame: types.FrameType | None, live: int) -> tuple[Place, Names]:
        """The user's place that runs, and the names of the modules that do, outermost first.

        Args:
            frame: the innermost.
            live: bytes that are there as what runs now begins.
        """
        place, found = NOWHERE, []
        while frame is not None:
            module = called_module(frame)
            if module is not None:
                found.append((frame, module))
            elif place is NOWHERE and is_users(frame.f_code):
                place = frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        found.reverse()
        keys = [(id(frame), id(module)) for frame, module in found]
        same = 0
        for call, key in zip(self._running, keys, strict=False):
            if call.key != key:
                break
            same += 1
        self._end(same)
        for at in range(same, len(found)):
            frame, module = found[at]
            if at == 0:
                self._called(module, frame.f_locals["args"], frame.f_locals["kwargs"])
            name = self._name(uncompiled(found[0][1]), uncompiled(module))
            self._counts.setdefault(name, _Count(type(uncompiled(module)).__name__))
            self._running.append(_Call(keys[at], name, live, live))
        return place, tuple(dict.fromkeys(call.name for call in self._running))

    def reach(self, live: int) -> None:
        """So many bytes are there now."""
        if self._running and live > self._running[-1].most:
            self._running[-1].most = live

    def was_there(self, nbytes: int) -> None:
        """What is seen only now was there before the calls that run."""
        for call in self._running:
            call.began += nbytes
            call.most += nbytes

    def forward_ends(self, made: Iterable[tuple[Names, int]]) -> None:
        """What modules made and is there as a backward begins: the modules that ran, and bytes."""
        held: Counter[str] = Counter()
        for within, nbytes in made:
            for name in within:
                held[name] += nbytes
        for name, nbytes in held.items():
            self._counts[name].held = max(self._counts[name].held, nbytes)

    def records(self) -> tuple[ModuleMemory, ...]:
        """What is known of each module, in the order of their first calls."""
        self._end(0)
        return tuple(ModuleMemory(name, count.kind, count.held, count.peak) for name, count in self._counts.items())

    def name_of(self, module: nn.Module) -> str:
        """The name of a module that has run; empty if it has not."""
        key = id(uncompiled(module))
        return next((names[key] for names in self._names.values() if key in names), "")

    def models(self) -> list[nn.Module]:
        """The modules that are there of those that no other one has called, in the order of their first calls."""
        return list(self._names)

    def _end(self, remaining: int) -> None:
        """Calls but the outermost ones are over."""
        while len(self._running) > remaining:
            call = self._running.pop()
            count = self._counts[call.name]
            count.peak = max(count.peak, call.most - call.began)
            self.reach(call.most)

    def _name(self, root: nn.Module, module: nn.Module) -> str:
        names = self._names.get(root)
        if names is None or id(module) not in names:
            names = self._names[root] = self._named(root, names)
        return names.setdefault(id(module), type(module).__name__)  # of one that the model does not hold

    def _named(self, root: nn.Module, before: dict[int, str] | None) -> dict[int, str]:
        """Names of the modules of an outermost one: the first's are bare, those of others follow their class."""
        if before is not None:  # modules came in since
            own = before[id(root)]
        else:
            kind = type(root).__name__
            self._models[kind] += 1
            own = kind if self._models[kind] == 1 else f"{kind}#{self._models[kind]}"
        bare = root is next(iter(self._names), root)
        named = {id(module): name if bare else f"{own}.{name}" for name, module in root.named_modules()}
        return {**(before or {}), **named, id(root): own}
