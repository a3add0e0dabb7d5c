"""How results of equal calls lie: blocks that repeat are run on fake tensors once, and then made from their layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from memopt.torch_compat.dispatch import no_modes
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, has_symbols
from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.storages import id_of_storage, span_of

# Of each fake mode, what is known of calls in it.
_KNOWN: WeakKeyDictionary[FakeTensorMode, dict[Any, Results]] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """How one result lies.

    Attributes:
        operand: in whose memory: the place of an operand; None: in its own.
        device: of what lies in its own memory.
    """

    operand: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The results of a call: layouts, None where there is none; `sequence` is what holds several."""

    layouts: tuple[_Layout | None, ...]
    sequence: type[tuple[Any, ...] | list[Any]] | None

    def made(self, mode: FakeTensorMode, operands: Sequence[Any]) -> Any:
        """Fake tensors that lie so, with memory of their own or in that of these operands."""
        with no_modes():
            values = [None if layout is None else _made(layout, mode, operands) for layout in self.layouts]
        return values[0] if self.sequence is None else self.sequence(values)


def key_of(target: Any, arguments: Any, operands: Sequence[Any], settings: tuple[Any, ...]) -> Any | None:
    """What calls have in common whose results lie alike; None for a call whose results are not told by that.

    Args:
        target: the operator.
        arguments: all arguments, hashable, a place holder for each operand.
        operands: their values, in order.
        settings: what the results depend on beside them.
    """
    if not isinstance(target, OpOverload):
        return None
    layouts = []
    for value in operands:
        # A constant's value may be looked at; a comparison of symbols would be a guard.
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
            return None
        if has_symbols(value) or value.is_conj() or value.is_neg():
            return None
        memory = value.untyped_storage().nbytes()
        if type(memory) is not int:  # a piece of fixed size of something that has none
            return None
        layouts.append(
            (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, memory),
        )
    return target, arguments, tuple(layouts), settings


def known(mode: FakeTensorMode, key: Any) -> Results | None:
    """How the results of a call of this key lie; None where that was not seen yet, or is not to be told."""
    return _KNOWN.setdefault(mode, {}).get(key)


def learn(mode: FakeTensorMode, key: Any, operands: Sequence[Any], value: Any) -> None:
    """Keep how the results of a call lie, where others of its key can be made from that."""
    sequence = type(value) if type(value) in (tuple, list) else None
    given: dict[int, int | None] = {}
    for number, operand in enumerate(operands):
        memory = id_of_storage(operand.untyped_storage())
        given[memory] = None if memory in given else number  # of two in one memory the schema alone tells which it is
    layouts: list[_Layout | None] = []
    seen: set[int] = set()
    for leaf in value if sequence is not None else (value,):
        if leaf is None:
            layouts.append(None)
            continue
        if type(leaf) is not FakeTensor or not _is_plain(leaf):
            return
        storage = leaf.untyped_storage()
        memory = id_of_storage(storage)
        place = given.get(memory)
        if place is None:
            if memory in given or memory in seen or leaf.storage_offset():
                return
            if storage.nbytes() != span_of(leaf.shape, leaf.stride()) * leaf.element_size():  # it is a part of more
                return
            seen.add(memory)
        elif (leaf.dtype, leaf.device) != (operands[place].dtype, operands[place].device):
            return
        if any(leaf is operand for operand in operands):
            return
        shape, strides = tuple(leaf.shape), tuple(leaf.stride())
        layouts.append(_Layout(place, shape, strides, int(leaf.storage_offset()), leaf.dtype, leaf.device))
    _KNOWN.setdefault(mode, {})[key] = Results(tuple(layouts), sequence)


def _is_plain(leaf: FakeTensor) -> bool:
    if leaf.layout is not torch.strided or leaf.constant is not None or leaf.requires_grad:
        return False
    return not (has_symbols(leaf) or leaf.is_conj() or leaf.is_neg())


def _made(layout: _Layout, mode: FakeTensorMode, operands: Sequence[Any]) -> FakeTensor:
    plain = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")
    if layout.operand is not None:
        memory = operands[layout.operand].untyped_storage()
        plain.set_(memory, layout.offset, layout.shape, layout.strides)
    return FakeTensor(mode, plain, layout.device)
