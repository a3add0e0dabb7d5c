"""What a call may have changed before it must begin anew: as when more graphs come than were planned for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.common.random_streams import RandomStreams
from memopt.memory.module_attributes import PARTS, ModuleAttributes, attributes_of
from memopt.memory.object_state import ObjectState, contents_of, refill
from memopt.torch_compat import pytree
from memopt.torch_compat.fully_sharded import let_go
from memopt.torch_compat.modules import OF_COMPILER, modules_of
from memopt.torch_compat.storages import id_of_storage, version_of
from memopt.torch_compat.transforms import is_transformed

_SMALL = 2**20  # bytes of memory that is copied: what counts or averages is small, larger ones are tables and masks
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, nn.Parameter)
_INTERNAL = PARTS - OF_COMPILER - {"_buffers", "_parameters"}
# A flag that a first forward sets beside them would be set back, and the next forward register them once more.
_HOOKS = sorted(name for name in _INTERNAL if "forward" in name or "backward" in name)


class CallStart:
    """What there is at the start of a call: random numbers, tensors of the model and the call, what its code reaches.

    Memory that is small is copied. Of larger it is known whether it was written to since.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any = (),
        *,
        state: bool,
        buffers: bool = False,
        written: Collection[int] | None = None,
    ) -> None:
        """Remember it.

        Args:
            model: about to be called.
            inputs: what it is called with.
            state: whether more than the random numbers may have to be set back.
            buffers: whether the model's buffers are copied however large they are.
            written: what such calls are known to write to, as `written` returns it: other trained parameters are not
                copied, of which there may be hundreds. None: it is not known.
        """
        self._model, self.state = model, state
        self._copies: dict[int, _Copy] = {}
        self._watched: list[tuple[_Name, torch.Tensor, int]] = []
        found, devices = attributes_of(modules_of(model)), set()
        self._attributes = found if state else []
        self._reached = ObjectState(model, inputs, found) if state else None
        for name, tensor in _tensors(found, inputs, () if self._reached is None else self._reached.tensors):
            memory = tensor.untyped_storage()
            if tensor.is_cuda and name.kind == "parameter":
                devices.add(tensor.device.index)
            key, size = id_of_storage(memory), memory.nbytes()
            if key in self._copies or not size:
                continue
            small = size <= _SMALL and (written is None or key in written or not tensor.requires_grad)
            if state and (small or (buffers and name.kind == "buffer")):
                self._copies[key] = _Copy(memory)
            elif not tensor.is_inference():
                self._watched.append((name, tensor, version_of(tensor)))
        self._random = RandomStreams(sorted(devices) if state else ())
        # Containers by number: those of hooks, tensors and the module's own that held anything.
        self._contents: dict[int, list[Any]] = {}
        for item in self._attributes:
            parts = [("", value) for name in ("_buffers", "_parameters") if (value := item.known.get(name))]
            for _, value in (*item.others, *item.hooks, *parts):
                if contents := contents_of(value):
                    self._contents[id(value)] = contents

    def written(self) -> set[int]:
        """Of memory that was copied, what has changed since, by `id_of_storage`."""
        return {key for key, copy in self._copies.items() if copy.differs}

    def restore(self) -> str:
        """Set back what has changed since; the name of what has and was not copied, or else empty."""
        self._random.restore()
        let_go(self._model)
        for item in self._attributes:
            self._restore_attributes(item)
        for item in self._attributes:
            if type(item.module) is item.kind:  # a lazy module is made another by its hook, once
                self._restore_hooks(item)
        for copy in self._copies.values():
            copy.restore()
        stays = "" if self._reached is None else self._reached.restore()
        written = (name for name, tensor, version in self._watched if version_of(tensor) != version)
        return next((name.text(self._model) for name in written), stays)

    def _restore_attributes(self, item: ModuleAttributes) -> None:
        held, known = item.held, item.known
        for name in [name for name, value in held.items() if name not in known and _is_own(name, value)]:
            del held[name]
        for name, value in known.items():
            if _is_own(name, value):
                held[name] = self._restored(value)

    def _restore_hooks(self, item: ModuleAttributes) -> None:
        held = item.held
        for name in _HOOKS:
            value = item.known.get(name)
            if value or value is False:
                held[name] = self._restored(value)
            elif held.get(name):  # there was none
                if contents_of(held[name]) is None:
                    held[name] = None
                else:
                    held[name].clear()

    def _restored(self, value: Any) -> Any:
        """The same value, which holds what it held if it is a container."""
        if contents_of(value) is not None:
            refill(value, self._contents.get(id(value), []))
        return value


class _Copy:
    """What is in a piece of memory, whatever shows it: views, and tensors that show an element many times."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self._memory = memory
        data = _bytes_of(memory)
        self._data: Any = data.clone() if data.is_cuda else data.numpy().copy()  # NumPy's takes no part of a budget

    @property
    def differs(self) -> bool:
        """Whether something else is there now."""
        data, known = _bytes_of(self._memory), torch.as_tensor(self._data)
        return data.shape == known.shape and not torch.equal(data, known)

    def restore(self) -> None:
        if self.differs:
            _bytes_of(self._memory).copy_(torch.as_tensor(self._data))


def _bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


class _Name(NamedTuple):
    """What a user calls a tensor: its module and its name there, or the number of an input."""

    kind: str
    module: nn.Module | None
    key: str

    def text(self, model: nn.Module) -> str:
        """As messages have it."""
        if self.kind in ("input", "tensor"):
            return f"{self.kind} {self.key}"
        path = next((path for path, module in model.named_modules() if module is self.module), "")
        return f"{self.kind} {f'{path}.{self.key}'.lstrip('.')!r}"


def _tensors(
    attributes: Sequence[ModuleAttributes], inputs: Any, reached: Iterable[torch.Tensor]
) -> Iterator[tuple[_Name, torch.Tensor]]:
    """Tensors that a call may write to: of memory that several of them show, buffers first."""
    for kind, values_of in _PLACES:
        for item in attributes:
            for key, value in values_of(item):
                if type(value) in _TENSORS and _is_plain(value):
                    yield _Name(kind, item.module, key), value
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if _is_plain(leaf):
            yield _Name("input", None, str(index)), leaf
    for leaf in reached:
        if _is_plain(leaf):
            yield _Name("tensor", None, "of an object"), leaf


# What a tensor of a module is, and where a module has those of that kind.
_PLACES: tuple[tuple[str, Callable[[ModuleAttributes], Iterable[tuple[str, Any]]]], ...] = (
    ("buffer", lambda item: item.buffers.items() if item.buffers else ()),
    ("parameter", lambda item: item.parameters.items() if item.parameters else ()),
    ("attribute", lambda item: item.others),
)


def _is_plain(value: Any) -> bool:
    plain = type(value) in _TENSORS and value.layout is torch.strided
    return plain and value.device.type in ("cpu", "cuda") and not is_transformed(value)


# -- attributes ------------------------------------------------------------------------------------------------------


def _is_own(name: str, value: Any) -> bool:
    """Whether an attribute is the model's, not torch's, and one that forward may change as plain Python does."""
    if name in _INTERNAL:
        return False
    return isinstance(value, (*_PLAIN, torch.Tensor)) or contents_of(value) is not None
