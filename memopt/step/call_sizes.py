"""Which sizes vary among a model's calls, and which of its calls are planned by their own sizes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from memopt.torch_compat import pytree
from memopt.torch_compat.static_shapes import Varying, marked_sizes

# So many calls of one form are remembered, and so many forms: further ones are planned by their own sizes.
_CALLS, _FORMS = 256, 64


@dataclasses.dataclass(frozen=True)
class Call:
    """What tells one call of a model from others.

    Attributes:
        form: all but sizes: the mode, the structure of the arguments, numbers among them, kinds of tensors.
        sizes: of each plain tensor, in order.
        tensors: those tensors.
    """

    form: Hashable
    sizes: tuple[tuple[int, ...], ...]
    tensors: tuple[torch.Tensor, ...] = dataclasses.field(repr=False)


def call_of(training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The call of a model in this mode with these arguments."""
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = tuple(leaf for leaf in leaves if type(leaf) is torch.Tensor)
    form = training, torch.is_grad_enabled(), str(structure), tuple(map(_form_of, leaves))
    return Call(form, tuple(tuple(tensor.shape) for tensor in tensors), tensors)


class CallSizes:
    """The sizes that calls of one model had so far."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self._seen: dict[Hashable, dict[tuple[tuple[int, ...], ...], None]] = {}
        self._apart: dict[Hashable, set[tuple[Hashable, Hashable]]] = collections.defaultdict(set)
        self._never: dict[Hashable, str] = {}

    def varying(self, plan: Hashable, call: Call, *, at_once: bool = True) -> Varying | None:
        """The sizes to be symbols in a call that is to be compiled; None where it is to be planned by its own sizes.

        The first sizes of a form are planned by themselves, unless the user has marked some that vary.

        Args:
            plan: what plans of such calls go by.
            call: which one.
            at_once: whether marks count before other sizes were seen.
        """
        if call.form in self._never or not self._note(call) or (call.form, call.sizes) in self._apart[plan]:
            return None
        seen = list(self._seen[call.form])
        marks = at_once or len(seen) > 1
        dims: dict[int, tuple[int, ...]] = {}
        histories: dict[tuple[int, ...], int] = {}  # of each size that varies: what it was in all calls, and is now
        for place, tensor in enumerate(call.tensors):
            marked = marked_sizes(tensor) if marks else frozenset()
            found = []
            for dim, size in enumerate(call.sizes[place]):
                history = tuple(sizes[place][dim] for sizes in seen)
                if size > 1 and (dim in marked or len(set(history)) > 1):  # code for no or one row is its own
                    found.append(dim)
                    histories[history] = size
            if found:
                dims[id(tensor)] = tuple(found)
        if not dims:
            self.plan_apart(plan, call)
            return None
        return Varying(dims, alike=len(set(histories.values())) == len(histories))

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


def _form_of(leaf: Any) -> Any:
    if type(leaf) is torch.Tensor:
        return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    if isinstance(leaf, torch.Tensor):
        return type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else type(leaf)
