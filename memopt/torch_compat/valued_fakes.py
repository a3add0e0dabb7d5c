"""Fake tensors that know where their values come from, so that code which looks at one is answered as in a real run.

Nothing is computed until a value is asked for: then the operations that lead to it run on the real tensors, without
gradients, each result freed after its last use. Real tensors are read and never written.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

# What a fake tensor cannot say.
UNKNOWN_VALUE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

_NO_DATA = "its data is not allocated yet"  # of an error where C++ reads a fake tensor's memory
_SMALL = 2**10  # elements of a result that is kept for the next question: what is counted meanwhile has the budget


def is_unknown(error: BaseException | None) -> bool:
    """Whether an error says no more than that a fake tensor has no values."""
    return isinstance(error, UNKNOWN_VALUE) or (isinstance(error, RuntimeError) and _NO_DATA in str(error))


class ValuedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode outside of tracing; what is traced with it is left to Dynamo, which guards on what it looks at.

    Questions about values whose origin is not known raise as with any fake tensor: `UNKNOWN_VALUE`. What was drawn at
    random is drawn anew, so that an answer about it is one of the likely ones. Tried on torch 2.13 and 2.14.

    Attributes:
        answered: whether a question about values was answered: with others it may have another answer.
        strays: whether a real tensor that is trained was met: a backward would reach it.
        by_chance: whether such an answer goes by what was drawn at random: a real run draws other numbers.
    """

    def __init__(self) -> None:
        """Make a mode that knows no tensor."""
        super().__init__(allow_non_fake_inputs=True)
        _format_numbers()
        self._known: Any = WeakIdKeyDictionary()  # fake tensor to `_Value`
        self._sharing: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # those of one storage
        self._answering = self.answered = self.by_chance = self.strays = False

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Let the value of a fake tensor be that of a real one, which must not change meanwhile."""
        call = _Call(None, (), {})
        call.kept = [real.detach()]
        known: Any = fake
        known.item_memo = None  # torch keeps a single number itself since 2.14, and nobody would hear of the question
        self._remember(fake, _Value(call, 0))

    def set_data(self, kept: Any, other: Any) -> None:
        """`kept.data = other`, which no operator tells of."""
        kept.data, kept.fake_device = other, other.fake_device
        self._known.pop(kept, None)
        if (value := self._known.get(other)) is not None:
            self._remember(kept, value)

    def without_value(self, like: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the CPU of the shape, strides and dtype of a meta tensor."""
        self._answering = True
        try:
            with self:
                return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        finally:
            self._answering = False

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """As a fake mode does; where that cannot answer, by the values."""
        kwargs = kwargs or {}
        if self._answering or torch._guards.TracingContext.try_get() is not None:
            return super().dispatch(func, types, args, kwargs)
        if func is torch.ops.aten._pack_padded_sequence.default and isinstance(args[1], FakeTensor):
            return self._packed(*args)
        call = self._call(func, args, kwargs)
        try:
            results = super().dispatch(func, types, args, kwargs)
        except UNKNOWN_VALUE as error:
            return self._answer(call, error)
        if func._schema.is_mutable:
            self._overwrite(func, args, kwargs, call)
            return results
        if call is not None:
            self._remember_all(results, call)
        for tensor in written_by(func, args, kwargs):  # without a word of it in the schema
            for other in self._alive(tensor):
                self._known.pop(other, None)
        return results

    def _call(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> _Call | None:
        """The call on values; None if one of them is not known."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        unknown = False
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, FakeTensor):
                leaves[index] = self._known.get(leaf)
                unknown |= leaves[index] is None
            elif isinstance(leaf, torch.Tensor):
                self.strays |= leaf.requires_grad
                call = _Call(None, (), {})
                call.kept = [leaf.detach()]
                leaves[index] = _Value(call, 0)
        if unknown:
            return None
        known_args, known_kwargs = pytree.tree_unflatten(leaves, spec)
        return _Call(func, known_args, known_kwargs)

    def _answer(self, call: _Call | None, error: Exception) -> object:
        """Run the call for real; its tensors become fake ones of known values."""
        if call is None:
            raise error
        try:
            with self._asked(call), _alone():
                results = _run(call)
        except Exception:
            raise error from None  # nothing more is known: there is no memory for it, say

        def fake(real: torch.Tensor) -> torch.Tensor:
            made = self.from_tensor(real, static_shapes=True)
            self.know(made, real)
            return made

        return pytree.tree_map_only(torch.Tensor, fake, results)

    def _packed(self, padded: Any, lengths: Any, batch_first: Any) -> object:
        """A packed sequence whose sizes of batches are real: recurrent layers read their memory."""
        length = self._known.get(lengths)
        if length is None:
            raise DynamicOutputShapeException(torch.ops.aten._pack_padded_sequence.default)
        like = _Call(None, (), {})
        like.kept = [torch.zeros(padded.shape[:2])]
        call = _Call(torch.ops.aten._pack_padded_sequence.default, (_Value(like, 0), length, batch_first), {})
        with self._asked(call):
            with _alone():
                packed, sizes = _run(call)
            return padded.new_empty((packed.shape[0], *padded.shape[2:])), sizes

    @contextlib.contextmanager
    def _asked(self, call: _Call) -> Iterator[None]:
        """Within: a question about the call's values is answered, and what runs for it is no question itself."""
        self._answering = self.answered = True
        try:
            self.by_chance |= any(map(_draws, _needed(call)[0]))
            yield
        finally:
            self._answering = False

    def _overwrite(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object], call: _Call | None) -> None:
        """A call has written into its arguments: what shares memory with them is no longer known."""
        written = list(written_by(func, args, kwargs))
        for tensor in written:
            sharing = self._alive(tensor)
            alone = len(written) == 1 and all(other is tensor for other in sharing)
            for other in sharing:
                self._known.pop(other, None)
            if alone and call is not None and tensor is args[0] and not tensor._is_view():
                self._remember(tensor, _Value(call, 0))

    def _remember_all(self, results: object, call: _Call) -> None:
        for index, leaf in enumerate(pytree.tree_leaves(results)):
            if isinstance(leaf, FakeTensor):
                self._remember(leaf, _Value(call, index))

    def _remember(self, fake: torch.Tensor, value: _Value) -> None:
        if not _has_storage(fake):  # what shares its memory is not known
            return
        self._known[fake] = value
        key = fake.untyped_storage()._cdata
        self._sharing[key] = [weakref.ref(tensor) for tensor in (*self._alive(fake), fake)]

    def _alive(self, fake: torch.Tensor) -> list[torch.Tensor]:
        if not _has_storage(fake):
            return []
        key = fake.untyped_storage()._cdata
        alive = [tensor for tensor in (ref() for ref in self._sharing.get(key, ())) if tensor is not None]
        self._sharing[key] = [weakref.ref(tensor) for tensor in alive]
        return [tensor for tensor in alive if tensor.untyped_storage()._cdata == key]


def _has_storage(fake: torch.Tensor) -> bool:
    return fake.layout is torch.strided


@functools.cache
def _format_numbers() -> None:
    """Let a scalar of such a mode be formatted as a number, as a real one is: a module's name is made so, once."""
    kind: Any = FakeTensor
    disable: Any = torch.compiler.disable
    plain = kind.__format__

    def formatted(self: torch.Tensor, spec: str) -> str:
        known = isinstance(getattr(self, "fake_mode", None), ValuedFakeMode)
        if known and self.dim() == 0 and torch._guards.TracingContext.try_get() is None:
            return format(self.item(), spec)
        return str(plain(self, spec))

    kind.__format__ = disable(formatted)  # there is nothing in it to be traced


class _Call:
    """An operation on values: its results if they are small, or given."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.kept: list[Any] | None = None

    @property
    def needs(self) -> list[_Call]:
        """The calls whose results it takes."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return list(dict.fromkeys(leaf.call for leaf in leaves if isinstance(leaf, _Value)))


class _Value:
    """One result of a call, by its place among the results."""

    def __init__(self, call: _Call, index: int) -> None:
        self.call, self.index = call, index


def _run(last: _Call) -> Any:
    """The results of a call, as the operation returns them."""
    order, uses = _needed(last)
    results: dict[_Call, list[Any]] = {}
    returned: Any = None
    for call in order:
        if call.kept is not None:
            results[call] = call.kept
            continue

        def value(leaf: Any) -> Any:
            return results[leaf.call][leaf.index] if isinstance(leaf, _Value) else leaf

        args, kwargs = pytree.tree_map(value, (call.args, call.kwargs))
        names = _names_written(call.func)
        arguments = [argument.name for argument in call.func._schema.arguments]
        args = [_copied(arg) if name in names else arg for name, arg in zip(arguments, args, strict=False)]
        kwargs = {name: _copied(arg) if name in names else arg for name, arg in kwargs.items()}
        returned = call.func(*args, **kwargs)
        results[call] = pytree.tree_leaves(returned)
        if sum(item.numel() for item in results[call] if isinstance(item, torch.Tensor)) <= _SMALL:
            call.kept = results[call]
        for needed in call.needs:
            uses[needed] -= 1
            if not uses[needed]:
                results.pop(needed, None)
    return returned


def _needed(last: _Call) -> tuple[list[_Call], dict[_Call, int]]:
    """All calls that a call needs, itself included, in order; and by how many of them each is used."""
    order: list[_Call] = []
    uses: dict[_Call, int] = {}
    waiting: list[tuple[_Call, bool]] = [(last, False)]
    while waiting:
        call, ready = waiting.pop()
        if ready:
            order.append(call)
            continue
        if call in uses:
            continue
        uses[call] = 0
        waiting.append((call, True))
        if call.kept is None:
            waiting += [(needed, False) for needed in call.needs]
    for call in order:
        if call.kept is None:
            for needed in call.needs:
                uses[needed] += 1
    return order, uses


def _draws(call: _Call) -> bool:
    """Whether a call draws random numbers; fused attention that drops nothing does so by its schema alone."""
    if call.func is None or torch.Tag.nondeterministic_seeded not in call.func.tags:
        return False
    names = [argument.name for argument in call.func._schema.arguments]
    return bool({**dict(zip(names, call.args, strict=False)), **call.kwargs}.get("dropout_p", 1.0) != 0.0)


def written_by(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to; batch norms' statistics are among them."""
    names = _names_written(func)
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in names:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))


def _names_written(func: Any) -> set[str]:
    """The arguments that an operation writes to; batch norms do not say so of their statistics."""
    arguments = func._schema.arguments
    written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    return written | ({each.name for each in arguments} & {"running_mean", "running_var"})


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda each: each.clone(memory_format=torch.preserve_format), value)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Real tensors behave as real: no modes, no gradients, no autocast, and random numbers that nobody misses."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if initialized else []
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad(), torch.random.fork_rng(devices):
        yield
