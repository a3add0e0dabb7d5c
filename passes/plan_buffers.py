"""Plan the memory of an inference program: one arena for all intermediates, results that the caller may hold."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from memopt.memory.aliasing import Aliasing, analyse, owner
from memopt.memory.buffers import Block, BufferPlan, Home, Placement
from memopt.memory.timeline import lifetimes
from memopt.passes.inplace import takes_storage
from memopt.program import Program, is_view, tensors_of
from memopt.solve.liveness import profile
from memopt.solve.pack import Buffer, pack

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions want."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What an operator asks of its memory.

    Attributes:
        into: whether it writes its results into memory that it is given; else it allocates them itself.
        scratch: bytes that it needs only while it runs.
        wish: bytes of scratch with which it runs faster; it gets as many as the arena has free at its step.
        slices: whether it also reads and writes slices of larger tensors.
    """

    into: bool = True
    scratch: int = 0
    wish: int = 0
    slices: bool = True


def plan_buffers(
    program: Program,
    forms: Mapping[str, Form] | None = None,
    *,
    joins: bool = True,
    seconds: float = 2.0,
) -> BufferPlan:
    """Decide where every value of an inference program lives; inputs, weights among them, are not placed.

    1. Liveness is by storage: views share their base's memory, and `meta["inplace"]` annotations are followed.
    2. A concatenation needs no copy where the producers of its parts write into slices of its result. A part is joined
       when its storage has nothing else in it, is no input and no result of the program, when all that reads or writes
       it can do so in a slice (see `Form.slices`), when no in-place operation would then be seen through the other
       name, and when no more bytes are in use at once than with all copies. A concatenation that is a run of a later
       one's parts is a part itself (DenseNet).
    3. What reaches the caller lives in fresh memory at every call, so that the caller may hold it: nothing can
       overwrite it.
    4. Everything else is placed in the arena, at multiples of `ALIGNMENT`.
    5. Scratch memory takes what is free at its step, as far as its operator wishes.

    Args:
        program: an inference program, in the order in which it will run.
        forms: by node name, what each operator asks; by default all write where they are told, slices included.
        joins: whether concatenations may be avoided.
        seconds: time for the placement, where the first heuristics do not reach the lower bound.

    Raises:
        ValueError: the program is a training program.
    """
    if program.training:
        raise ValueError("buffers are planned for inference programs: a training step is planned by its two graphs")
    planner = _Planner(program, forms or {})
    if joins:
        planner.join_all()
    return planner.plan(seconds)


@dataclasses.dataclass(frozen=True)
class _Inside:
    """That a storage is a slice of another one's value: from `start` on along `dim`."""

    parent: int
    dim: int
    start: int


class _Planner:
    """Collects what touches each storage, joins storages, and places what is left."""

    def __init__(self, program: Program, forms: Mapping[str, Form]) -> None:
        self.forms = forms
        self.aliasing: Aliasing = analyse(program)
        life = lifetimes(program, self.aliasing)
        self.steps, self.spans = life.steps, life.spans
        self.step = {node: index for index, node in enumerate(self.steps)}
        self.returned = {
            s for value in program.output_nodes if isinstance(value, fx.Node) for s in self.aliasing.of[value]
        }
        self.inside: dict[int, _Inside] = {}
        self.contents: dict[int, list[int]] = {}  # per storage, those that are slices of it
        self.joins: dict[str, tuple[bool, ...]] = {}
        self.whole: dict[int, torch.Tensor] = {}  # per storage, the value that it was made for
        self.users: dict[int, list[fx.Node]] = {}  # per storage, the operations that touch it, views left out
        self.views: dict[int, list[fx.Node]] = {}
        self.written: dict[int, list[int]] = {}  # per storage, the steps at which it is written over
        for node in self.steps:
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        touched = {s for value in (node, *node.all_input_nodes) for s in self.aliasing.of.get(value, ())}
        kind = self.views if is_view(node) else self.users
        for s in touched:
            kind.setdefault(s, []).append(node)
        for value, s in zip(tensors_of(node), self.aliasing.of[node], strict=True):
            if takes_storage(node) is not None:
                self.written.setdefault(s, []).append(self.step[node])
            elif self.aliasing.storages[s].producer is node:
                self.whole.setdefault(s, value)

    def _form(self, node: fx.Node) -> Form:
        return self.forms.get(node.name, Form())

    # -- concatenations ------------------------------------------------------------------------------------------

    def join_all(self) -> None:
        """Avoid the copies of every concatenation; if that takes more memory, of those that each take no more."""
        limit = self._most_in_use()
        self._join_within(None)
        if self._most_in_use() > limit:
            self.inside, self.contents, self.joins = {}, {}, {}
            self._join_within(limit)

    def _join_within(self, limit: int | None) -> None:
        seen: list[tuple[fx.Node, int, list[fx.Node]]] = []
        for node in self.steps:
            if node.target is not torch.ops.aten.cat.default or not self._form(node).into:
                continue
            given: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
            where: int = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)  # type: ignore[assignment]
            dim = where % node.meta["val"].dim()
            joined = []
            for part, start, count in self._parts(given, dim, seen):
                joined += [self._join(node, part, dim, start, limit)] * count
            if any(joined):
                self.joins[node.name] = tuple(joined)
            seen.append((node, dim, given))

    def _parts(
        self, given: list[fx.Node], dim: int, seen: Sequence[tuple[fx.Node, int, list[fx.Node]]]
    ) -> list[tuple[fx.Node, int, int]]:
        """What a concatenation is made of: the node, where it starts, and how many of the given parts it stands for."""
        found, index, start = [], 0, 0
        while index < len(given):
            part, count = given[index], 1
            for other, other_dim, run in seen:
                free = self.aliasing.of[other][0] not in self.inside
                longer = len(run) > count or part is given[index]
                if free and other_dim == dim and longer and given[index : index + len(run)] == run:
                    part, count = other, len(run)
            found.append((part, start, count))
            start += sum(
                each.meta["val"].shape[dim] for each in given[index : index + count] if each.meta["val"].numel()
            )
            index += count
        return found

    def _join(self, node: fx.Node, part: fx.Node, dim: int, start: int, limit: int | None) -> bool:
        """Make the part's storage a slice of the concatenation's, if that is safe."""
        if part.op != "call_function" or not self._may_join(node, part):
            return False
        mine, theirs = self.aliasing.of[part][0], self.aliasing.of[node][0]
        self.inside[mine] = _Inside(theirs, dim, start)
        self.contents.setdefault(theirs, []).append(mine)
        fits = all(self._fits(s) for s in self._group(mine))
        if fits and limit is not None:
            fits = self._most_in_use() <= limit
        if not fits:
            del self.inside[mine]
            self.contents[theirs].remove(mine)
        return fits

    def _may_join(self, node: fx.Node, part: fx.Node) -> bool:
        mine, theirs = self.aliasing.of[part][0], self.aliasing.of[node][0]
        value, result, whole = part.meta["val"], node.meta["val"], self.whole.get(mine)
        if whole is None or mine in self.inside or mine in self.returned or mine == theirs:
            return False
        if not self._form(owner(self.aliasing.storages[mine].producer)).into:
            return False
        if value.dtype != result.dtype or value.dim() != result.dim() or not value.numel():
            return False
        if whole.layout is not torch.strided or _geometry(value) != _geometry(whole) or value.storage_offset():
            return False
        if (
            self.aliasing.storages[mine].nbytes != value.numel() * value.element_size()
            or value.is_conj()
            or value.is_neg()
        ):
            return False
        step = self.step[node]
        if any(written >= step for written in self.written.get(mine, ())):
            return False  # the concatenation would change after it was made
        last = max(self._end(s) for s in self._group(mine)) - 1
        above: int | None = theirs
        while above is not None:
            if any(written <= last for written in self.written.get(above, ())):
                return False  # the part would change while it is still read
            above = self.inside[above].parent if above in self.inside else None
        return True

    def _fits(self, storage: int) -> bool:
        """Whether all that touches the storage can do so where it lies now."""
        whole = self.whole[storage]
        strides, _ = self._layout(storage)
        if all(size == 1 or a == b for size, a, b in zip(whole.shape, strides, whole.stride(), strict=True)):
            return True
        if not all(self._form(node).slices for node in self.users.get(storage, ())):
            return False
        return all(self._views_hold(node, whole, strides) for node in self.views.get(storage, ()))

    def _views_hold(self, node: fx.Node, whole: torch.Tensor, strides: Sequence[int]) -> bool:
        """Whether the view can be taken of the slice; only views of the whole value are tried."""
        base = node.args[0] if node.args else None
        if not isinstance(base, fx.Node) or base.op != "call_function" or node.all_input_nodes != [base]:
            return False
        if is_view(base) or _geometry(base.meta["val"]) != _geometry(whole):
            return False
        if node.target is torch.ops.aten.as_strided.default:
            return False  # it counts entries of memory, whose neighbours would be others'
        stand_in = torch.empty_strided(tuple(whole.shape), tuple(strides), dtype=whole.dtype, device="meta")
        try:
            result = node.target(stand_in, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # torch refuses by either, by whether its own Python takes the view
            return False
        # What reads the view reads a slice as well; a copy in place of a view would be a value of its own.
        readers = [user for user in node.users if user.op == "call_function"]
        return isinstance(result, torch.Tensor) and all(
            not is_view(user) and user.target is not operator.getitem and self._form(user).slices for user in readers
        )

    def _group(self, storage: int) -> list[int]:
        found = [storage]
        for inner in self.contents.get(storage, ()):
            found += self._group(inner)
        return found

    def _end(self, storage: int) -> int:
        span = self.spans[storage]
        assert span is not None
        return span[1]

    def _layout(self, storage: int) -> tuple[tuple[int, ...], int]:
        """The strides of the value that fills the storage, and its first byte in the outermost storage."""
        whole = self.whole[storage]
        if storage not in self.inside:
            return tuple(whole.stride()), 0
        slot = self.inside[storage]
        strides, offset = self._layout(slot.parent)
        return strides, offset + slot.start * strides[slot.dim] * whole.element_size()

    # -- blocks --------------------------------------------------------------------------------------------------

    def _roots(self) -> list[tuple[int, int, int]]:
        """The outermost storages that are not the inputs', each with the span of all that lies in it."""
        found = []
        for storage, span in enumerate(self.spans):
            if span is not None and storage not in self.inside:
                spans = [self.spans[s] for s in self._group(storage)]
                found.append((storage, min(s[0] for s in spans if s), max(s[1] for s in spans if s)))
        return found

    def _home(self, storage: int) -> Home:
        if not self._form(owner(self.aliasing.storages[storage].producer)).into:
            return Home.OPERATOR
        return Home.OUTPUT if storage in self.returned else Home.ARENA

    def _spans_of_roots(self) -> list[tuple[int, int, int]]:
        """What must be placed, as (start, end, bytes): storages, and scratch memory."""
        found = [
            (start, end, _rounded(self.aliasing.storages[storage].nbytes))
            for storage, start, end in self._roots()
            if self._home(storage) is Home.ARENA
        ]
        return found + [
            (self.step[node], self.step[node] + 1, _rounded(size)) for node, size in self._scratch().items()
        ]

    def _most_in_use(self) -> int:
        """The most bytes at once of what must be placed."""
        return int(profile(len(self.steps), self._spans_of_roots()).max(initial=0))

    def _scratch(self) -> dict[fx.Node, int]:
        return {node: self._form(node).scratch for node in self.steps if self._form(node).scratch}

    def _wishes(self) -> dict[fx.Node, int]:
        """Scratch memory with what is free at each step, as far as wished."""
        in_use: list[int] = profile(len(self.steps), self._spans_of_roots()).tolist()
        scratch, most = self._scratch(), max(in_use, default=0)
        for step, node in enumerate(self.steps):
            free = scratch.get(node, 0) + most - in_use[step]
            if self._form(node).wish > scratch.get(node, 0):
                scratch[node] = min(self._form(node).wish, free)
        return {node: size for node, size in scratch.items() if size}

    def plan(self, seconds: float) -> BufferPlan:
        """Place everything: with scratch memory as wished, unless that takes a larger arena."""
        least = self._placed(self._scratch(), seconds)
        if self._wishes() == self._scratch():
            return least
        generous = self._placed(self._wishes(), seconds)
        return generous if generous.arena_bytes <= least.arena_bytes else least

    def _placed(self, scratch_bytes: Mapping[fx.Node, int], seconds: float) -> BufferPlan:
        blocks: list[Block] = []
        block_of: dict[int, int] = {}
        for storage, start, end in self._roots():
            names = tuple(self.aliasing.storages[s].producer.name for s in self._group(storage))
            block_of.update(dict.fromkeys(self._group(storage), len(blocks)))
            nbytes = self.aliasing.storages[storage].nbytes
            first = min(names, key=self._born)
            blocks.append(Block(first, self._home(storage), nbytes, start, end, holds=names))
        scratch = {}
        for node, nbytes in scratch_bytes.items():
            scratch[node.name] = len(blocks)
            step = self.step[node]
            blocks.append(Block(node.name, Home.ARENA, nbytes, step, step + 1, scratch=True))
        arena = [index for index, block in enumerate(blocks) if block.home is Home.ARENA]
        buffers = [Buffer(blocks[k].start, blocks[k].end, _rounded(blocks[k].nbytes), ALIGNMENT) for k in arena]
        packing = pack(buffers, timeout=seconds)
        for index, offset in zip(arena, packing.offsets, strict=True):
            blocks[index] = dataclasses.replace(blocks[index], offset=offset)
        plan = BufferPlan(
            steps=tuple(node.name for node in self.steps),
            blocks=tuple(blocks),
            values={node.name: self._placements(node, blocks, block_of) for node in self.steps if not is_view(node)},
            reads=tuple(self._reads(node, block_of) for node in self.steps),
            scratch=scratch,
            joins=self.joins,
            arena_bytes=packing.size,
            lower_bound=packing.lower_bound,
            alignment=ALIGNMENT,
        )
        plan.check()
        return plan

    def _born(self, name: str) -> int:
        return next((k for k, node in enumerate(self.steps) if node.name == name), len(self.steps))

    def _placements(
        self, node: fx.Node, blocks: Sequence[Block], block_of: Mapping[int, int]
    ) -> tuple[Placement | None, ...]:
        found: list[Placement | None] = []
        for value, s in zip(tensors_of(node), self.aliasing.of[node], strict=True):
            if s not in block_of or blocks[block_of[s]].home is Home.OPERATOR or value.layout is not torch.strided:
                found.append(None)
                continue
            strides, offset = tuple(value.stride()), int(value.storage_offset() * value.element_size())
            if s in self.inside:
                strides, offset = self._layout(s)
            found.append(Placement(block_of[s], offset, tuple(value.shape), strides, value.element_size()))
        return tuple(found)

    def _reads(self, node: fx.Node, block_of: Mapping[int, int]) -> tuple[int, ...]:
        found = {block_of[s] for value in node.all_input_nodes for s in self.aliasing.of[value] if s in block_of}
        return tuple(sorted(found))


def _rounded(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype
