"""What a call may have changed before it must begin anew: as when more graphs come than were planned for."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from memopt.common.random_streams import RandomStreams
from memopt.memory.attributes import objects_of
from memopt.torch_compat import pytree
from memopt.torch_compat.fully_sharded import let_go
from memopt.torch_compat.storages import id_of_storage, version_of
from memopt.torch_compat.transforms import is_transformed

_SMALL = 2**20  # bytes of memory that is copied: what counts or averages is small, larger ones are tables and masks
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = (torch.Tensor, nn.Parameter)
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers", "_parameters"}
# A flag that a first forward sets beside them would be set back, and the next forward register them once more.
_HOOKS = sorted(name for name in _INTERNAL if "forward" in name or "backward" in name)


class CallStart:
    """What there is at the start of a call: random numbers, tensors of the model and of the call, plain attributes.

    Memory that is small is copied. Of larger it is known whether it was written to since.
    """

    def __init__(
        self, model: nn.Module, inputs: Any = (), *, state: bool, buffers: bool = False, objects: bool = False
    ) -> None:
        """Remember it.

        Args:
            model: about to be called.
            inputs: what it is called with.
            state: whether more than the random numbers may have to be set back.
            buffers: whether the model's buffers are copied however large they are.
            objects: whether attributes of plain objects that its modules hold (a cache, a counter) are set back, too.
        """
        self._model = model
        self._random = RandomStreams(sorted({p.device.index for p in model.parameters() if p.is_cuda}) if state else ())
        self._copies: dict[int, _Copy] = {}
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[nn.Module, type, dict[str, Any]]] = []  # those that there are: most are empty
        for name, tensor, is_buffer in _tensors(model, inputs):
            memory = tensor.untyped_storage()
            if id_of_storage(memory) in self._copies or not memory.nbytes():
                continue
            if state and (memory.nbytes() <= _SMALL or (buffers and is_buffer)):
                self._copies[id_of_storage(memory)] = _Copy(memory)
            elif not tensor.is_inference():
                self._watched.append((name, tensor, version_of(tensor)))
        for module in model.modules() if state else ():
            attributes = module.__dict__
            self._attributes.append((attributes, _own(attributes)))
            hooks = {name: _kept(value) for name in _HOOKS if (value := attributes.get(name)) or value is False}
            self._hooks.append((module, type(module), hooks))
        for value in objects_of(model) if state and objects else ():
            self._attributes.append((vars(value), {key: _kept(item) for key, item in vars(value).items()}))

    def restore(self) -> str:
        """Set back what has changed since; the name of a tensor that has and was not copied, or else empty."""
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
        return next((name for name, tensor, version in self._watched if version_of(tensor) != version), "")


class _Copy:
    """What is in a piece of memory, whatever shows it: views, and tensors that show an element many times."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self._memory = memory
        data = _bytes_of(memory)
        self._data: Any = data.clone() if data.is_cuda else data.numpy().copy()  # NumPy's takes no part of a budget

    def restore(self) -> None:
        data, known = _bytes_of(self._memory), torch.as_tensor(self._data)
        if data.shape == known.shape and not torch.equal(data, known):
            data.copy_(known)


def _bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _tensors(model: nn.Module, inputs: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Tensors that a call may write to, by what a user calls them, and which of them are buffers."""
    for name, buffer in model.named_buffers():
        if _is_plain(buffer):
            yield f"buffer {name!r}", buffer, True
    for name, parameter in model.named_parameters():
        if _is_plain(parameter):
            yield f"parameter {name!r}", parameter, False
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if type(value) in _TENSORS and _is_plain(value):
                yield f"attribute {f'{path}.{key}'.lstrip('.')!r}", value, False
    for index, leaf in enumerate(pytree.tree_leaves(inputs)):
        if _is_plain(leaf):
            yield f"input {index}", leaf, False


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
    for name, value in attributes.items():
        if name in _INTERNAL:
            continue
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


def contents_of(value: Any) -> list[Any] | None:
    """What a list, a dictionary, a set or a queue holds; None of anything else."""
    if type(value) in _MAPPINGS:
        return list(value.items())
    return list(value) if type(value) in (list, set, collections.deque) else None


def refill(value: Any, contents: list[Any]) -> None:
    """Have a list, a dictionary, a set or a queue hold that, where it holds anything else."""
    held = contents_of(value) or []
    if len(held) == len(contents) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(operator.is_, a, b)))
        for a, b in zip(held, contents, strict=True)
    ):
        return
    value.clear()
    if isinstance(value, dict):
        for key, item in contents:  # a Counter's `update` would count
            value[key] = item
    else:
        value.update(contents) if isinstance(value, set) else value.extend(contents)
