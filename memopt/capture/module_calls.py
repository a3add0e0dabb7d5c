"""The calls of a model's modules within one step on fake tensors: what each saves for backward, and may be recomputed.

A call with effects beyond its outputs, its module's buffers and attributes is not recomputed: they would come twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.capture.eager_call import SHOWN
from memopt.common.random_streams import host_state
from memopt.memory.attributes import objects_of
from memopt.memory.reach import plain_tensors
from memopt.solve.module_checkpoints import Nested
from memopt.step.module_checkpoints import ModuleCall
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.modules import forward_hooks
from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.storages import storage_id
from memopt.torch_compat.valued_fakes import written_by

_CONTAINERS = (dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque)
_OWN = frozenset({"_parameters", "_buffers", "_modules"})

_Memory = tuple[int, int]  # a storage, and when it was made: numbers of storages come again


@dataclasses.dataclass
class _Call:
    """A call that has begun.

    Attributes:
        name, index: as of `ModuleCall`.
        parent: the number of the call that it lies in.
        began: when.
        given: the memory of its arguments.
        returned: that of its outputs.
        saved: bytes of what it saves, by memory.
        written: memory that is older than the call, and it has written to.
        draws: whether it draws random numbers.
        effects: whether it does more than can be done twice.
    """

    name: str
    index: int
    parent: int | None
    began: int
    given: dict[_Memory, int]
    returned: set[_Memory] = dataclasses.field(default_factory=set)
    saved: dict[_Memory, int] = dataclasses.field(default_factory=dict)
    written: set[_Memory] = dataclasses.field(default_factory=set)
    draws: bool = False
    effects: bool = False


class ModuleCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the calls of a model's modules."""

    def __init__(self) -> None:
        """None was seen yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._open: list[int] = []
        self._clock = 0
        self._born: dict[int, int] = {}
        self._saved: list[tuple[_Memory, tuple[int, ...]]] = []  # memory, and the calls that were open
        self._buffers: dict[str, dict[_Memory, str]] = {}

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within: the calls of these modules are seen; the model is a twin, whose attributes may be changed."""
        counts = collections.Counter[str]()
        for name, module in model.named_modules():
            named = module.named_buffers()
            self._buffers[name] = {
                self._memory(buffer): key for key, buffer in named for buffer in plain_tensors(buffer)
            }
            vars(module)["forward"] = self._seen(name, module, module.forward, counts)
        with torch.autograd.graph.saved_tensors_hooks(self._save, _same), self:
            yield

    def found(self) -> tuple[list[ModuleCall], list[Nested]]:
        """The calls in the order in which they began, and what is gained if one is checkpointed."""
        names = [self._named(call) for call in self._calls]
        nested = [
            Nested(call.parent, 0 if name is None else self._gain(number, call), sum(self._inside(call).values()))
            for number, (call, name) in enumerate(zip(self._calls, names, strict=True))
        ]
        return [
            name or ModuleCall(call.name, call.index) for call, name in zip(self._calls, names, strict=True)
        ], nested

    def _named(self, call: _Call) -> ModuleCall | None:
        """The call; None where it is not to be recomputed."""
        buffers = self._buffers[call.name]
        if call.effects or not call.written <= buffers.keys():
            return None
        return ModuleCall(call.name, call.index, call.draws, tuple(sorted(buffers[memory] for memory in call.written)))

    def _inside(self, call: _Call) -> dict[_Memory, int]:
        """What it makes and saves, its outputs left out, which are there anyway."""
        return {
            memory: size
            for memory, size in call.saved.items()
            if memory[1] >= call.began and memory not in call.returned
        }

    def _gain(self, number: int, call: _Call) -> int:
        beside = {memory for memory, calls in self._saved if number not in calls}
        held = sum(size for memory, size in call.given.items() if memory[1] and memory not in beside)
        saved = sum(
            size for memory, size in call.saved.items() if memory in call.given and memory[1] and memory not in beside
        )
        return sum(self._inside(call).values()) + saved - held

    # -- while it runs ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what it makes, writes and draws."""
        kwargs, calls = dict(kwargs or {}), [self._calls[number] for number in self._open]
        given = set(self._memories((args, kwargs)))
        results = func(*args, **kwargs)
        self._clock += 1
        if isinstance(func, OpOverload) and calls:
            written = set(self._memories(list(written_by(func, args, kwargs))))
            draws = torch.Tag.nondeterministic_seeded in func.tags
            own = any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs)))
            for call in calls:
                call.written |= {memory for memory in written if memory[1] < call.began}
                call.draws |= draws
                call.effects |= draws and own
        known = {storage for storage, _ in given}
        for leaf in _tensors(results):
            if storage_id(leaf) not in known:
                self._born[storage_id(leaf)] = self._clock
        return results

    def _seen(self, name: str, module: nn.Module, forward: Any, counts: collections.Counter[str]) -> Any:
        """A module's forward, at which is looked."""

        def seen(*args: Any, **kwargs: Any) -> Any:
            self._clock += 1
            given = self._memories((args, kwargs))
            call = _Call(name, counts[name], self._open[-1] if self._open else None, self._clock, given)
            counts[name] += 1
            self._open.append(len(self._calls))
            self._calls.append(call)
            before, drawn = _contents(module, (args, kwargs)), host_state()
            try:
                outputs = forward(*args, **kwargs)
            finally:
                self._open.pop()
            call.returned = set(self._memories(outputs))
            call.effects |= before is None or before != _contents(module, (args, kwargs)) or host_state() != drawn
            call.effects |= any(forward_hooks(part) for part in module.modules() if part is not module)
            return outputs

        return seen

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor is saved for backward."""
        for memory, size in self._memories(tensor).items():
            self._saved.append((memory, tuple(self._open)))
            for number in self._open:
                self._calls[number].saved[memory] = size
        return tensor.detach() if isinstance(tensor, FakeTensor) else tensor  # what torch's kernels read stays real

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        return storage_id(tensor), self._born.get(storage_id(tensor), 0)

    def _memories(self, values: Any) -> dict[_Memory, int]:
        return {self._memory(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors(values)}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return (plain for leaf in leaves for plain in plain_tensors(leaf))


def _contents(module: nn.Module, inputs: Any) -> Any:
    """What the containers and objects that a call may write into hold; None where it is not known."""
    if any(not isinstance(leaf, SHOWN) for leaf in pytree.tree_leaves(inputs)):
        return None
    parts = [*module.modules(), *objects_of(module)]
    held = [value for part in parts for name, value in vars(part).items() if name not in _OWN and name != "forward"]
    objects = [[(name, id(value)) for name, value in vars(item).items()] for item in objects_of(module)]
    return [(id(value), _items(value)) for value in held if type(value) in _CONTAINERS], objects, _nested(inputs)


def _items(value: Any) -> list[Any]:
    return [(id(key), id(item)) for key, item in value.items()] if isinstance(value, dict) else list(map(id, value))


def _nested(value: Any) -> Any:
    """The identities of what containers hold, at any depth."""
    if isinstance(value, dict):
        return [(id(key), _nested(item)) for key, item in value.items()]
    return [_nested(item) for item in value] if isinstance(value, (list, tuple)) else id(value)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
