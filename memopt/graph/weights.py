"""A program's weights, found where their modules hold them: a loop may put others there, and let go of these.

A program that kept the tensors it was captured with would keep memory that the loop has freed (`swap_tensors`,
`load_state_dict(assign=True)`, a cast), and trial steps would run on weights of another time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn

from memopt.torch_compat.fake_tensors import FakeTensor, no_fake_mode
from memopt.torch_compat.modules import held_by
from memopt.torch_compat.storages import version_of


class Held:
    """Where a weight is found: it is not kept alive by this."""

    __slots__ = ("_find", "_likeness")

    def __init__(self, find: Callable[[], torch.Tensor | None]) -> None:
        """Of what `find` gives now."""
        self._find = find
        value = find()
        self._likeness = None if value is None else _likeness(value)

    def __call__(self) -> torch.Tensor | None:
        """What is there now, detached; None if nothing is, or nothing like the tensor that was there."""
        value = self.itself()
        return None if value is None else known(value)

    def itself(self) -> torch.Tensor | None:
        """What is there now, as its module has it; None as of the call."""
        value = self._find()
        return None if value is None or _likeness(value) != self._likeness else value


def held(module: nn.Module, name: str) -> Held:
    """The parameter or buffer that a module itself has under a name.

    No weak reference to the tensor is made: `swap_tensors` refuses one that has any.
    """
    return Held(functools.partial(_in_module, weakref.ref(module), name))


def by_itself(value: torch.Tensor) -> Held | None:
    """A tensor whose module is not known; None if it has no value that could be known."""
    return None if known(value) is None else Held(weakref.ref(value))


Value = torch.Tensor | Held


class Weights(Mapping[str, torch.Tensor]):
    """Real tensors by name: constants as they are, weights looked up each time. A weight that is gone is not in it.

    Attributes:
        entries: tensors, and where others are found; those that are gone too.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        """Of tensors, and of where others are found."""
        self.entries = dict(_values_of(values))

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.entries[name]
        found = value if isinstance(value, torch.Tensor) else value()
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.entries if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def joined(*parts: Mapping[str, Value]) -> Weights:
    """All of them; where two have a name, the later one's."""
    values: dict[str, Value] = {}
    for part in parts:
        values.update(_values_of(part))
    return Weights(values)


def only(state: Mapping[str, torch.Tensor], names: Collection[str]) -> Weights:
    """Those with these names."""
    return Weights({name: value for name, value in _values_of(state).items() if name in names})


def elsewhere(given: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of these tensors does not lie where a state finds those with their names."""
    found = {name: state.get(name) for name in given}
    return {name: value for name, value in given.items() if not _same_memory(value, found[name])}


def same_source(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether both have the same tensor by a name, or find it in the same place; neither is looked up."""
    return _values_of(first)[name] is _values_of(second)[name]


def versions(state: Mapping[str, Value]) -> dict[str, int]:
    """How often each tensor of a state was written to, as autograd counts it; those of inference mode left out."""
    found = {}
    for name, value in _values_of(state).items():
        tensor = value if isinstance(value, torch.Tensor) else value.itself()
        if tensor is not None and not tensor.is_inference():
            found[name] = version_of(tensor)
    return found


def known(value: torch.Tensor) -> torch.Tensor | None:
    """The tensor's value, unless it has none or changes to it cannot be noticed."""
    if value.is_inference() or value.is_meta or isinstance(value, FakeTensor):
        return None
    with no_fake_mode():
        return value.detach()


def _same_memory(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    return type(value) is type(other) is torch.Tensor and value.is_set_to(other)


def _in_module(module: weakref.ref[nn.Module], name: str) -> torch.Tensor | None:
    here = module()
    return None if here is None else held_by(here, name)


def _values_of(state: Mapping[str, Value]) -> Mapping[str, Value]:
    return state.entries if isinstance(state, Weights) else state


def _likeness(value: torch.Tensor) -> tuple[object, ...]:
    """What a program's graph takes for granted of a tensor."""
    kind = torch.Tensor if type(value) is nn.Parameter else type(value)
    return kind, value.dtype, value.device, value.layout, value.shape, _strides(value)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    return value.stride() if value.layout == torch.strided else ()
