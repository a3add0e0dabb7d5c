"""Which sizes vary among a model's calls, and which of its calls are planned by their own sizes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.torch_compat.static_shapes import Varying, marked_sizes

# So many calls of one form are remembered, and so many forms: further ones are planned by their own sizes.
_CALLS, _FORMS = 256, 64
# So deep in the arguments, among so many parts of each, tensors are looked for: in containers, and in objects such as a
# cache of keys and values.
_DEEP, _WIDE = 6, 1000

Path = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """What tells one call of a model from others.

    Attributes:
        form: all but sizes: the mode, the structure of the arguments, numbers among them, kinds of tensors.
        sizes: of each plain tensor, in order.
        paths: where in the arguments it is.
        tensors: those tensors.
    """

    form: Hashable
    sizes: tuple[tuple[int, ...], ...]
    paths: tuple[Path, ...]
    tensors: tuple[torch.Tensor, ...] = dataclasses.field(repr=False)

    def without_tensors(self) -> Call:
        """The same, which holds no memory."""
        return dataclasses.replace(self, tensors=())


def call_of(training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The call of a model in this mode with these arguments."""
    leaves: list[tuple[Path, Any]] = []
    for place, value in (*enumerate(args), *kwargs.items()):
        _gather(value, (place,), leaves, set())
    tensors = {path: leaf for path, leaf in leaves if type(leaf) is torch.Tensor}
    form = training, torch.is_grad_enabled(), tuple((path, _form_of(leaf)) for path, leaf in leaves)
    sizes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    return Call(form, sizes, tuple(tensors), tuple(tensors.values()))


def _gather(value: Any, path: Path, found: list[tuple[Path, Any]], within: set[int]) -> None:
    """List what an argument holds: tensors and numbers in containers, and tensors in objects of other kinds."""
    if isinstance(value, torch.Tensor) or len(path) > _DEEP:
        found.append((path, value))
        return
    parts = _parts_of(value)
    if parts is None or len(parts) > _WIDE:
        found.append((path, value))
        return
    found.append((path, type(value)))
    if id(value) in within:
        return
    plain = isinstance(value, list | tuple | Mapping)
    for name, part in parts:
        inner: list[tuple[Path, Any]] = []
        _gather(part, (*path, name), inner, within | {id(value)})
        found += inner if plain else [(at, leaf) for at, leaf in inner if isinstance(leaf, torch.Tensor)]


def _parts_of(value: Any) -> list[tuple[Hashable, Any]] | None:
    """What a container or an object holds, by name; None of what holds nothing."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, nn.Module | type) or callable(value):
        return None
    try:
        held = object.__getattribute__(value, "__dict__")  # its own code is not asked
    except AttributeError:
        return None
    return [(str(key), part) for key, part in held.items()]


class CallSizes:
    """The sizes that calls of one model had so far."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self._seen: dict[Hashable, dict[tuple[tuple[int, ...], ...], None]] = {}
        self._apart: dict[Hashable, set[tuple[Hashable, Hashable]]] = collections.defaultdict(set)
        self._never: dict[Hashable, str] = {}

    def varying(self, plan: Hashable, call: Call, *, at_once: bool = True, after: Call | None = None) -> Varying | None:
        """The sizes to be symbols in a call that is to be compiled; None where it is to be planned by its own sizes.

        The first sizes of a form are planned by themselves, unless the user has marked some that vary.

        Args:
            plan: what plans of such calls go by.
            call: which one.
            at_once: whether marks count before other sizes were seen.
            after: another call whose sizes may be this one's, too: a cache has the length of what was called before.
        """
        if call.form in self._never or not self._note(call) or (call.form, call.sizes) in self._apart[plan]:
            return None
        seen = list(self._seen[call.form])
        marks = at_once or len(seen) > 1
        grown = _grown(call, after) if after is not None and len(seen) == 1 else {}
        dims, twice = dict[int, tuple[int, ...]](), False
        histories: dict[tuple[int, ...], int] = {}  # of each size that varies: what it was in all calls, and is now
        for place, tensor in enumerate(call.tensors):
            marked = (marked_sizes(tensor) if marks else frozenset()) | grown.get(place, frozenset())
            found = []
            for dim, size in enumerate(call.sizes[place]):
                history = tuple(sizes[place][dim] for sizes in seen)
                if size > 1 and (dim in marked or len(set(history)) > 1):  # code for no or one row is its own
                    found.append(dim)
                    histories[history] = size
            if found:
                dims[id(tensor)] = tuple(found)
            twice |= len({call.sizes[place][dim] for dim in found}) < len(found)
        if not dims:
            self.plan_apart(plan, call)
            return None
        largest: dict[int, int] = {}
        for history, size in histories.items():
            largest[size] = max(largest.get(size, 0), *history)
        return Varying(dims, alike=not twice and len(largest) == len(histories), largest=largest)

    def plan_apart(self, plan: Hashable, call: Call) -> None:
        """Such calls are planned by their own sizes."""
        self._note(call)
        self._apart[plan].add((call.form, call.sizes))

    def apart(self, call: Call) -> int:
        """How many sizes of this form are planned by themselves."""
        return len({sizes for known in self._apart.values() for form, sizes in known if form == call.form})

    def never(self, call: Call, reason: str) -> None:
        """Calls of this form are planned by their own sizes, whatever these are, for this reason."""
        self._never[call.form] = reason

    def _note(self, call: Call) -> bool:
        """Remember the sizes; whether they could be."""
        if call.form not in self._seen and len(self._seen) >= _FORMS:
            return False
        seen = self._seen.setdefault(call.form, {})
        if len(seen) < _CALLS:
            seen[call.sizes] = None
        return call.sizes in seen


def _grown(call: Call, before: Call) -> dict[int, frozenset[int]]:
    """By place of a tensor, the sizes that are to vary: others than before, or of what is new as others were before."""
    known = dict(zip(before.paths, before.sizes, strict=True))
    changed: dict[int, frozenset[int]] = {}
    were: set[int] = set()
    for place, (path, sizes) in enumerate(zip(call.paths, call.sizes, strict=True)):
        if len(known.get(path, ())) == len(sizes):
            changed[place] = frozenset(dim for dim, size in enumerate(sizes) if size != known[path][dim])
            were |= {known[path][dim] for dim in changed[place]}
    new = {
        place: frozenset(dim for dim, size in enumerate(sizes) if size in were)
        for place, (path, sizes) in enumerate(zip(call.paths, call.sizes, strict=True))
        if path not in known
    }
    return changed | new


def _form_of(leaf: Any) -> Any:
    if type(leaf) is torch.Tensor:
        return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    if isinstance(leaf, torch.Tensor):
        return type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else type(leaf)
