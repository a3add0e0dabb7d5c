"""What is looked at when backward of a compiled graph begins, and was noted when its forward ended.

1. Inputs that backward reads to recompute values must be what they were: a plan reads more of them than eager does, and
   autograd itself sees no write through `tensor.data`. Those of which eager saves views must lie where they lay: it
   reads what they were though `tensor.data = …` has given them other memory, and a plan would read what they are.
2. What depends only on outputs that the loss did not use gets no gradient, where AOTAutograd would return zeros; hooks
   are called for gradients only, where autograd calls those of all that the graph was given.
3. A second derivative is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from memopt.errors import ShortOfMemoryError
from memopt.memory.fingerprint import fingerprint_of, same_fingerprint
from memopt.step.hooked import spare
from memopt.step.missing_tangents import ZEROS, Tangent
from memopt.torch_compat.backward import compiled_node, keeps_graph, leave_missing, nodes_so_far, running_node
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.returned import saved_in_part
from memopt.torch_compat.storages import id_of_storage, storage_id, version_of
from memopt.torch_compat.tracing_context import in_trace

# Calls of one graph on a GPU after which contents are compared no more, since that waits for the device: who writes
# between forward and backward does so in every step.
_CALLS = 3
_NONE = "memopt: no gradients"  # in the metadata of autograd's node
# Eager has a graph for each output there, memopt one for all.
_RELEASED = (
    "the model itself has taken gradients, and let go of what this backward needs: give that torch.autograd.grad "
    "retain_graph=True, or call the original model"
)
_CHANGED = "memopt: changed, and of no gradient that is given"


@dataclasses.dataclass(frozen=True)
class InPart:
    """What forward saves for some of its outputs only, or in place of what eager saves.

    Attributes:
        place: among the results of forward.
        name: what a user calls it.
        outputs: those that it is saved for.
        recomputed: whether it is saved in place of what eager saves.
    """

    place: int
    name: str
    outputs: tuple[int, ...]
    recomputed: bool


@dataclasses.dataclass(frozen=True)
class BackwardFacts:
    """What holds of one graph's backward.

    Attributes:
        outputs: how many values autograd knows as the graph's outputs.
        sources: per gradient, the positions of the outputs that it comes of; None where that does not matter.
        recomputed: positions and names of the arguments that backward reads to recompute values.
        in_part: what is looked at here, and not by autograd, since it may not matter.
        written: positions of the arguments that forward writes to; None where that is not known.
        shown: positions and names of the arguments that backward reads as they lay when forward ran.
        tangents: the gradients that backward takes, in its order; none where that is not known, or sizes vary.
        without: positions of the arguments that require a gradient and never get one.
    """

    outputs: int = 0
    sources: tuple[tuple[int, ...] | None, ...] = ()
    recomputed: tuple[tuple[int, str], ...] = ()
    in_part: tuple[InPart, ...] = ()
    written: tuple[int, ...] | None = None
    shown: tuple[tuple[int, str], ...] = ()
    tangents: tuple[Tangent, ...] = ()
    without: tuple[int, ...] = ()

    def listed(self) -> list[Any]:
        """The facts as plain lists."""
        sources = [None if item is None else list(item) for item in self.sources]
        in_part = [[item.place, item.name, list(item.outputs), item.recomputed] for item in self.in_part]
        recomputed, shown = ([list(item) for item in named] for named in (self.recomputed, self.shown))
        tangents = [item.listed() for item in self.tangents]
        return [self.outputs, sources, recomputed, in_part, self.written, shown, tangents, list(self.without)]

    @staticmethod
    def of_list(record: Any) -> BackwardFacts:
        """The facts of such lists; raises ValueError or TypeError where they are none."""
        outputs, sources, recomputed, in_part, written, shown, tangents, without = record
        return BackwardFacts(
            int(outputs),
            tuple(None if item is None else tuple(map(int, item)) for item in sources),
            tuple((int(place), str(name)) for place, name in recomputed),
            tuple(InPart(int(a), str(b), tuple(map(int, c)), bool(d)) for a, b, c, d in in_part),
            None if written is None else tuple(map(int, written)),
            tuple((int(place), str(name)) for place, name in shown),
            tuple(map(Tangent.of_list, tangents)),
            tuple(map(int, without)),
        )


def watched(
    run: Callable[..., Any],
    facts: BackwardFacts,
    say: Callable[[torch.OutOfMemoryError], str],
    inside: Callable[[], Exception | None] = lambda: None,
) -> Callable[..., Any]:
    """A compiled graph whose backward is looked after.

    Args:
        run: takes the graph's arguments and returns its outputs in a sequence.
        facts: of its backward.
        say: one line for memory that ran out while that was looked at.
        inside: while the model's call runs, what is raised where the model takes a gradient of gradients; else None.
    """
    left = _CALLS

    def call(*args: Any) -> Any:
        nonlocal left
        if not torch.is_grad_enabled() or in_trace():
            return run(*args)
        first = nodes_so_far()
        with saved_in_part(bool(facts.in_part)) as in_part:
            results = run(*args)
        node = compiled_node(results, first) or compiled_node(args, first)
        if node is not None:
            left -= 1
            node.register_prehook(_Entry(facts, args, left >= 0, say, inside, in_part).begin)
        return results

    return call


class _Entry:
    """One call's forward, until its backward begins."""

    def __init__(
        self,
        facts: BackwardFacts,
        args: Sequence[Any],
        contents: bool,
        say: Callable[[torch.OutOfMemoryError], str],
        inside: Callable[[], Exception | None],
        in_part: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self._facts, self._say, self._inside, self._released = facts, say, inside, False
        known = {item.place: item for item in facts.in_part}
        self._in_part = [(value, version_of(value), known[place]) for place, value in in_part if place in known]
        self._stamps: list[Stamp | Place] = [Stamp(args[place], name, contents) for place, name in facts.recomputed]
        self._stamps += [Place(args[place], name) for place, name in facts.shown]
        self._without_gradient = [args[place] for place in facts.without]

    # Where the model itself asks for gradients, Dynamo would trace this.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called with the gradients of the outputs before backward runs; None stands for one that there is not.

        Raises:
            RuntimeError: what backward recomputes values from is not what it was, or the model itself has let go of it.
            CaptureError: the model takes a gradient of gradients.
            MemoryError: memory ran out.
        """
        inside = self._inside()
        if inside is not None and torch.is_grad_enabled():
            raise inside
        if self._released:
            raise RuntimeError(_RELEASED)
        self._released = inside is not None and not keeps_graph()
        known = len(gradients) == self._facts.outputs
        missing = {place for place, gradient in enumerate(gradients) if known and gradient is None}
        changed = self._look(missing)
        if not keeps_graph():
            self._stamps, self._in_part = [], []  # the caller's tensors are the caller's
        none = self._without(missing) if known else []
        node = running_node()
        if known and self._facts.tangents:
            leave_missing(node)
            node.metadata[ZEROS] = [item for item in self._facts.tangents if item.output in missing]
        for tensor in self._without_gradient:
            spare(tensor)
        node.metadata[_NONE], node.metadata[_CHANGED] = frozenset(none), changed
        if none or changed or torch.is_grad_enabled():
            _Exit(node, none, len(self._facts.sources))

    def _look(self, missing: Collection[int]) -> tuple[str, ...]:
        """Names of what was changed that no gradient given is of: of the others it is refused."""
        given = {place for place in range(self._facts.outputs) if place not in missing}
        unread = {item.name for item in self._facts.in_part if given.isdisjoint(item.outputs)}
        harmless: list[str] = []
        for value, version, item in self._in_part:
            if version_of(value) == version:
                continue
            if given.isdisjoint(item.outputs):
                harmless.append(item.name)
                continue
            what = "recomputes activations from it, or keeps it for them" if item.recomputed else "reads it"
            raise RuntimeError(
                f"{item.name} was changed between forward and backward, which {what}: change it after backward(), "
                "or call the original model in such a step"
            )
        try:
            with torch.no_grad():
                for stamp in self._stamps:
                    if stamp.name not in unread:
                        stamp.check()
                    elif stamp.differs():
                        harmless.append(stamp.name)
            return tuple(harmless)
        except torch.OutOfMemoryError as error:
            reason = self._say(error)
        raise ShortOfMemoryError(reason)  # out here, so that no traceback holds on to the step's tensors

    def _without(self, missing: set[int]) -> list[int]:
        """Which gradients there are not, where those of these outputs are not given."""
        sources = enumerate(self._facts.sources)
        return [place for place, read in sources if read is not None and missing.issuperset(read)]


class _Exit:
    """What becomes of the gradients that one run of backward returns."""

    def __init__(self, node: Any, none: Sequence[int], count: int) -> None:
        self._none, self._count, self._look = frozenset(none), count, look_of(node)
        self._next = [edge for edge, _ in node.next_functions]
        self._handle = node.register_hook(self.end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, returned: Sequence[torch.Tensor | None], _: Any) -> Any:
        """Called with what backward returns; returns what autograd takes instead, None for the same."""
        self._handle.remove()
        self._look([value for place, value in enumerate(returned) if place not in self._none])
        if torch.is_grad_enabled():
            for node in {value.grad_fn for value in returned if value is not None and value.grad_fn is not None}:
                node.register_prehook(refuse)
        if not self._none or len(returned) != self._count:
            return None
        for place in self._none:
            parameter = getattr(self._next[place], "variable", None) if place < len(self._next) else None
            if parameter is not None:
                spare(parameter)
        return tuple(None if place in self._none else value for place, value in enumerate(returned))


def no_gradient(node: Any) -> frozenset[int]:
    """Which results of the backward that a node runs are no gradients: the loss does not use what they come of."""
    found: frozenset[int] = node.metadata.get(_NONE, frozenset())
    return found


def look_of(node: Any) -> Callable[[Sequence[Any]], None]:
    """What looks at the gradients that the backward of a node gives.

    What was changed between forward and backward goes into them times zero where it belongs to outputs that the loss
    does not use: that is nothing unless its derivative is infinite.

    Raises:
        RuntimeError: when called with gradients that are not finite, after such a change.
    """
    names: tuple[str, ...] = node.metadata.get(_CHANGED, ())

    def look(gradients: Sequence[Any]) -> None:
        numbers = (value for value in gradients if isinstance(value, torch.Tensor) and value.is_floating_point())
        if names and not all(bool(value.isfinite().all()) for value in numbers):
            raise RuntimeError(
                f"{names[0]} was changed between forward and backward, and gradients are not finite: change it after "
                "backward(), or call the original model in such a step"
            )

    return look


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse(_: Any) -> None:
    """Refuse a second derivative.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "memopt compiles first derivatives only: call the original model, not the one that memopt.compile returned, "
        "where a gradient of gradients is taken (create_graph=True)"
    )


class Stamp:
    """What tells whether an argument was written to."""

    __slots__ = ("_before", "_contents", "_value", "name")

    def __init__(self, value: Any, name: str, contents: bool) -> None:
        self._value, self.name = value, name
        self._before = None if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) else _place(value)
        # On a GPU there may be no room for a copy of what has gaps.
        looks = self._before is not None and (value.device.type == "cpu" or (contents and value.is_contiguous()))
        self._contents = _fingerprint(value) if looks else None

    def differs(self) -> bool:
        """Whether it was written to."""
        if self._before is None:
            return False
        if self._contents is not None:
            return not same_fingerprint(self._contents, fingerprint_of(self._value))
        return self._before != _place(self._value)

    def check(self) -> None:
        """Refuse to recompute from it if it was written to.

        Raises:
            RuntimeError: it was.
        """
        if self.differs():
            raise RuntimeError(
                f"{self.name} was changed between forward and backward, which recomputes activations from it: change "
                "it after backward(), or call the original model in such a step"
            )


class Place:
    """What tells whether an argument was given other memory, and other values there."""

    __slots__ = ("_layout", "_memory", "_size", "_value", "name")

    def __init__(self, value: Any, name: str) -> None:
        self._value, self.name = value, name
        known = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        # Which keeps what `tensor.data = …` lets go of, as eager does.
        self._memory = value.untyped_storage() if known else None
        self._size = 0 if self._memory is None else self._memory.nbytes()
        self._layout = (value.dtype, value.storage_offset(), value.size(), value.stride()) if known else None

    def differs(self) -> bool:
        """Whether it lies elsewhere, with other values."""
        memory, value = self._memory, self._value
        if memory is None or self._layout is None or id_of_storage(memory) == storage_id(value):
            return False
        dtype, offset, shape, stride = self._layout
        if memory.nbytes() != self._size or memory.device != value.device:  # what it was is gone
            return True
        if (shape, dtype) != (value.shape, value.dtype):
            return True
        with torch.no_grad():
            before = torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)
            return not torch.equal(before, value)

    def check(self) -> None:
        """Refuse to read it in backward if it lies elsewhere.

        Raises:
            RuntimeError: it does.
        """
        if self.differs():
            raise RuntimeError(
                f"{self.name} was given other memory between forward and backward (tensor.data = …), which reads it, "
                "and recomputes from it: change it after backward(), or call the original model in such a step"
            )


def _fingerprint(value: torch.Tensor) -> Any:
    """Of what a tensor holds; None of a layout without storage."""
    try:
        with torch.no_grad():
            return fingerprint_of(value)
    except (RuntimeError, NotImplementedError):
        return None


def _place(value: torch.Tensor) -> tuple[int, ...]:
    """Version and storage of a tensor: a storage may be filled anew elsewhere, as sharded parameters are."""
    try:
        return (
            0 if value.is_inference() else version_of(value),
            storage_id(value),
            int(value.storage_offset()),
        )
    except (RuntimeError, NotImplementedError):
        return ()
