"""What a call may have changed before it must begin anew: as when more graphs come than were planned for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.common.random_streams import RandomStreams
from memopt.memory.object_state import ObjectState, contents_of, refill
from memopt.torch_compat import pytree
from memopt.torch_compat.fully_sharded import let_go
from memopt.torch_compat.modules import own_buffers, own_parameters
from memopt.torch_compat.storages import id_of_storage, version_of
from memopt.torch_compat.transforms import is_transformed

_SMALL = 2**20  # bytes of memory that is copied: what counts or averages is small, larger ones are tables and masks
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, nn.Parameter)
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers", "_parameters"}
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
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[nn.Module, type, dict[str, Any]]] = []  # those that there are: most are empty
        modules, devices = [*model.named_modules()], set()
        self._reached = ObjectState(model, inputs) if state else None
        for name, tensor in _tensors(modules, inputs, () if self._reached is None else self._reached.tensors):
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
        for _, module in modules if state else ():
            attributes = module.__dict__
            self._attributes.append((attributes, _own(attributes)))
            hooks = {name: _kept(value) for name in _HOOKS if (value := attributes.get(name)) or value is False}
            self._hooks.append((module, type(module), hooks))

    def written(self) -> set[int]:
        """Of memory that was copied, what has changed since, by `id_of_storage`."""
        return {key for key, copy in self._copies.items() if copy.differs}

    def restore(self) -> str:
        """Set back what has changed since; the name of what has and was not copied, or else empty."""
        self._random.restore()
        let_go(self._model)
        for attributes, known in self._attributes:
            for name in [name for name, value in attributes.items() if name not in known and _is_own(name, value)]:
                del attributes[name]
            attributes.update({name: _restored(kept) for name, kept in known.items()})
        for module, kind, hooks in self._hooks:
            if type(module) is kind:  # a lazy module is made another by its hook, once
                _restore_hooks(module.__dict__, hooks)
        for copy in self._copies.values():
            copy.restore()
        stays = "" if self._reached is None else self._reached.restore()
        return next((name.text for name, tensor, version in self._watched if version_of(tensor) != version), stays)


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
    """What a user calls a tensor: its module's path and its name there, or the number of an input."""

    kind: str
    path: str
    key: str

    @property
    def text(self) -> str:
        """As messages have it."""
        if self.kind in ("input", "tensor"):
            return f"{self.kind} {self.key}"
        return f"{self.kind} {f'{self.path}.{self.key}'.lstrip('.')!r}"


def _tensors(
    modules: Iterable[tuple[str, nn.Module]], inputs: Any, reached: Iterable[torch.Tensor]
) -> Iterator[tuple[_Name, torch.Tensor]]:
    """Tensors that a call may write to: of memory that several of them show, buffers first."""
    for kind, values_of in _PLACES:
        for path, module in modules:
            for key, value in values_of(module):
                if type(value) in _TENSORS and _is_plain(value):
                    yield _Name(kind, path, key), value
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if _is_plain(leaf):
            yield _Name("input", "", str(index)), leaf
    for leaf in reached:
        if _is_plain(leaf):
            yield _Name("tensor", "", "of an object"), leaf


# What a tensor of a module is, and where a module has those of that kind.
_PLACES: tuple[tuple[str, Callable[[nn.Module], Iterable[tuple[str, Any]]]], ...] = (
    ("buffer", lambda module: own_buffers(module).items()),  # TorchScript's modules have them elsewhere
    ("parameter", lambda module: own_parameters(module).items()),
    ("attribute", lambda module: [(key, value) for key, value in vars(module).items() if key not in _INTERNAL]),
)


def _is_plain(value: Any) -> bool:
    plain = type(value) in _TENSORS and value.layout is torch.strided
    return plain and value.device.type in ("cpu", "cuda") and not is_transformed(value)


# -- attributes ------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """A container, and what it held."""

    value: Any
    contents: list[Any]


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's own attributes as `_restored` takes them: there may be thousands, before each call."""
    found = {}
    for name in attributes.keys() - _INTERNAL:
        value = attributes[name]
        if type(value) in _PLAIN or isinstance(value, (*_PLAIN, torch.Tensor)):
            found[name] = value
        elif (contents := contents_of(value)) is not None:
            found[name] = _Kept(value, contents)
    return found


def _is_own(name: str, value: Any) -> bool:
    """Whether an attribute is the model's, not torch's, and one that forward may change as plain Python does."""
    if name in _INTERNAL:
        return False
    return isinstance(value, (*_PLAIN, torch.Tensor)) or contents_of(value) is not None


def _kept(value: Any) -> Any:
    contents = contents_of(value)
    return value if contents is None else _Kept(value, contents)


def _restored(kept: Any) -> Any:
    if not isinstance(kept, _Kept):
        return kept
    refill(kept.value, kept.contents)
    return kept.value


def _restore_hooks(attributes: dict[str, Any], hooks: Mapping[str, Any]) -> None:
    for name in _HOOKS:
        if name in hooks:
            attributes[name] = _restored(hooks[name])
        elif attributes.get(name):  # there was none
            if contents_of(attributes[name]) is None:
                attributes[name] = None
            else:
                attributes[name].clear()
