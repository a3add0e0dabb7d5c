"""ShrinkIndices: max pooling remembers where in its window the largest value was, in one or two bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import VIEWS, Builder, Refused, erase_unused
from memopt.pass_manager import Change, Pass, PassResult, attempt_each
from memopt.program import Phase, Program

aten = torch.ops.aten
prims = torch.ops.prims

_BACKWARD: dict[Any, Any] = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}
_EXPAND = "prims._low_memory_max_pool_offsets_to_indices.default"  # registered with Inductor only


class ShrinkIndices(Pass):
    """Save small offsets for the backward graph of max pooling in place of int64 indices; expand them late or never.

    Algebra: the index of the largest value of a window counts from the start of the image (h·W + w). Less the index of
    the window's own corner it is a·dh·W + b·dw, for the a-th row and b-th column of the window, at most
    (kh-1)·dh·W + (kw-1)·dw: one byte or two, which the corner, known from the output's position, makes the index again.

    Cases:
        1. Windows that do not overlap and fill the input: each input belongs to one window, so its gradient is that
           of the window where the offset is its own position, else zero. No index is ever expanded, and the pooled
           input is not read. A gradient of -0.0 becomes 0.0 as it does when it is added to zero.
        2. Other windows: backward expands the offsets just before it reads them.
        3. Inductor's `_low_memory_max_pool_with_offsets` saves offsets, which backward expands when it begins: they
           are treated as in 1, or expanded where they are read, by the addition or by the pooling's own backward.

    Numbers: bitwise equal.

    Refusals: the indices are returned to the caller, or something but the backward of the same pooling reads them.
    Adaptive pooling and programs without a backward graph are left alone.
    """

    name: ClassVar[str] = "shrink_indices"
    lowers_floor: ClassVar[bool] = True

    def run(self, program: Program) -> PassResult:
        """Return the program with smaller pooling indices; one change per pooling."""
        if not program.training:
            return PassResult(program)
        if not any(node.target in _BACKWARD or str(node.target) == _EXPAND for node in program.calls):
            return PassResult(program)
        new = program.copy()

        def shrink(node: fx.Node) -> Change | None:
            if node.target in _BACKWARD:
                return _indices(node)
            if str(node.target) == _EXPAND and node.meta["phase"] is Phase.BACKWARD:
                return _offsets(new, node)
            return None

        changes, refusals = attempt_each(new.calls, shrink)
        return PassResult.of(program, new, changes, refusals)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The geometry of a pooling: per spatial dimension kernel, stride, padding and dilation; sizes of both sides."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(
        cls, kernel: Any, stride: Any, padding: Any, dilation: Any, inputs: Sequence[int], outputs: Sequence[int]
    ) -> _Windows:
        count = len(inputs)

        def each(value: Any) -> tuple[int, ...]:
            values = [value] if isinstance(value, int) else list(value)
            return tuple(int(v) for v in (values * count if len(values) == 1 else values))

        return cls(each(kernel), each(stride or kernel), each(padding), each(dilation), tuple(inputs), tuple(outputs))

    @property
    def apart(self) -> bool:
        """Whether each input belongs to exactly one window."""
        plain = self.stride == self.kernel and not any(self.padding) and all(step == 1 for step in self.dilation)
        filled = (
            size == count * width for size, count, width in zip(self.inputs, self.outputs, self.kernel, strict=True)
        )
        return plain and all(filled)

    @property
    def weights(self) -> tuple[int, ...]:
        """What one step along each dimension adds to an index into the input."""
        return tuple(math.prod(self.inputs[dim + 1 :]) for dim in range(len(self.inputs)))

    @property
    def largest(self) -> int:
        """The largest offset from the index of a window's corner."""
        steps = zip(self.kernel, self.dilation, self.weights, strict=True)
        return sum((width - 1) * step * weight for width, step, weight in steps)


class _Builder(Builder):
    """Adds what indices are made of, on the device of what `like` reads."""

    def __init__(self, before: fx.Node, like: fx.Node) -> None:
        super().__init__(before, like)
        self.device = like.all_input_nodes[0].meta["val"].device

    def grid(
        self, lengths: Sequence[int], starts: Sequence[int], steps: Sequence[int], dtype: torch.dtype, gap: int
    ) -> fx.Node:
        """The sums of one arithmetic sequence per dimension; with `gap`, dimensions of length one between them."""
        total: fx.Node | None = None
        for dim, (length, start, step) in enumerate(zip(lengths, starts, steps, strict=True)):
            line = self.call(
                prims.iota.default, length, start=start, step=step, dtype=dtype, device=self.device, requires_grad=False
            )
            following = (1 + gap) * (len(lengths) - 1 - dim)
            line = self.call(aten.view.default, line, [length, *[1] * following]) if following else line
            total = line if total is None else self.call(aten.add.Tensor, total, line)
        assert total is not None
        return total

    def corners(self, windows: _Windows) -> fx.Node:
        """The index of each window's corner, in the shape of the output."""
        starts = [-pad * weight for pad, weight in zip(windows.padding, windows.weights, strict=True)]
        steps = [stride * weight for stride, weight in zip(windows.stride, windows.weights, strict=True)]
        return self.grid(windows.outputs, starts, steps, torch.int64, 0)

    def spread(self, gradient: fx.Node, offsets: fx.Node, windows: _Windows, weights: Sequence[int]) -> fx.Node:
        """The gradient of the input [..., rows, columns] where no two windows overlap."""
        value, dtype = gradient.meta["val"], offsets.meta["val"].dtype
        lead = offsets.meta["val"].shape[: -len(windows.outputs)]
        cells = [*lead, *(size for count in windows.outputs for size in (count, 1))]
        own = self.grid(windows.kernel, [0] * len(weights), weights, dtype, 1)
        mask = self.call(aten.eq.Tensor, self.call(aten.view.default, offsets, cells), own)
        added = self.call(aten.add.Tensor, gradient, 0.0)
        zero = self.call(aten.full.default, [], 0.0, dtype=value.dtype, device=self.device)
        filled = self.call(aten.where.self, mask, self.call(aten.view.default, added, cells), zero)
        return self.call(aten.view.default, filled, [*lead, *windows.inputs])


def _indices(pool: fx.Node) -> Change | None:
    """Cases 1 and 2. Raises Refused before anything is edited."""
    items: dict[Any, list[fx.Node]] = {}
    for item in pool.users:
        items.setdefault(item.args[1], []).append(item)
    readers = [(item, user) for item in items.get(1, []) for user in item.users]
    if not readers:
        return None
    for _, user in readers:
        if user.op == "output":
            raise Refused("its indices are returned to the caller")
        if user.target is not _BACKWARD[pool.target] or user.args[1:7] != _arguments(pool):
            raise Refused(f"{user.name} reads its indices, and is not its backward")
    (index, reader), *more = readers
    if more:
        raise Refused("its indices are read more than once")
    value, data = index.meta["val"], pool.args[0].meta["val"]  # type: ignore[union-attr]
    _, kernel, stride, padding, dilation, _ = _arguments(pool)
    spatial = 2 if pool.target is aten.max_pool2d_with_indices.default else 3
    windows = _Windows.of(kernel, stride, padding, dilation, data.shape[-spatial:], value.shape[-spatial:])
    small = _smallest(windows.largest)
    if small is None:
        raise Refused(f"its offsets go up to {windows.largest}, beyond 32 bits")
    forward = _Builder(index.next, pool)
    moved = forward.call(aten.sub.Tensor, index, forward.corners(windows))
    offsets = forward.call(prims.convert_element_type.default, moved, small)
    offsets.meta["val"] = value.to(small)
    backward = _Builder(reader, reader)
    gradient = reader.args[0]
    assert isinstance(gradient, fx.Node)
    plain = all(tensor.is_contiguous() for tensor in (value, gradient.meta["val"], reader.meta["val"]))
    if windows.apart and plain:
        result = backward.spread(gradient, offsets, windows, windows.weights)
        reader.replace_all_uses_with(result)
        pool.graph.erase_node(reader)
        return Change(
            f"{reader.name} by comparing offsets of {small.itemsize} bytes", (pool.name, reader.name), (result.name,)
        )
    wide = backward.call(prims.convert_element_type.default, offsets, torch.int64)
    expanded = backward.call(aten.add.Tensor, wide, backward.corners(windows))
    reader.replace_input_with(index, expanded)
    return Change(f"{index.name} saved as offsets of {small.itemsize} bytes", (index.name,), (offsets.name,))


def _arguments(pool: fx.Node) -> tuple[Any, ...]:
    """The pooling's arguments as its backward gets them: input, kernel, stride, padding, dilation, ceil_mode."""
    defaults: tuple[Any, ...] = (None, None, [], 0, 1, False)
    spatial = 2 if pool.target is aten.max_pool2d_with_indices.default else 3
    given = (*pool.args, *defaults[len(pool.args) :])
    full = [[value] * spatial if isinstance(value, int) and not isinstance(value, bool) else value for value in given]
    return tuple(full)


def _smallest(largest: int) -> torch.dtype | None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return None


def _offsets(program: Program, expand: fx.Node) -> Change | None:
    """Case 3."""
    offsets, kernel, inputs, stride, padding, dilation = expand.args
    assert isinstance(offsets, fx.Node)
    value = offsets.meta["val"]
    windows = _Windows.of(kernel, stride, padding, dilation, inputs, value.shape[-len(inputs) :])  # type: ignore[arg-type]
    reader = _only_scatter(expand) or _only_backward(expand, windows)
    if reader is not None and windows.apart and value.is_contiguous():
        gradient: Any = reader.args[3 if reader.target is aten.scatter_add.default else 0]
        within = tuple(math.prod(windows.kernel[dim + 1 :]) for dim in range(len(windows.kernel)))
        builder = _Builder(reader, reader)
        result = builder.spread(gradient, offsets, windows, within)
        flat = builder.call(aten.view.default, result, list(reader.meta["val"].shape))
        reader.replace_all_uses_with(flat)
        before = (expand.name, reader.name)
        erase_unused(program.graph, [reader])
        return Change(f"{before[1]} by comparing offsets", before, (flat.name,))
    return _sunk(expand)


def _only_backward(expand: fx.Node, windows: _Windows) -> fx.Node | None:
    """The pooling's backward as one operator, as torch 2.11 leaves it, if nothing else reads the indices."""
    if len(expand.users) != 1:
        return None
    (user,) = expand.users
    if user.target not in _BACKWARD.values() or user.args[7] is not expand:
        return None
    gradient, data, kernel, stride, padding, dilation = user.args[:6]
    spatial = len(windows.inputs)
    value, shape = gradient.meta["val"], data.meta["val"].shape  # type: ignore[union-attr]
    same = windows == _Windows.of(kernel, stride, padding, dilation, shape[-spatial:], value.shape[-spatial:])
    return user if same and value.is_contiguous() and user.meta["val"].is_contiguous() else None


def _only_scatter(expand: fx.Node) -> fx.Node | None:
    """The addition of a gradient to zeros at the indices, if nothing else reads them."""
    node = expand
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in VIEWS:
            node = user
            continue
        zeros, dim, index, gradient = (*user.args, *[None] * 4)[:4]
        fits = user.target is aten.scatter_add.default and index is node and dim in (1, -1)
        if not fits or not isinstance(zeros, fx.Node) or zeros.target is not aten.full.default or zeros.args[1] != 0:
            return None
        plain = isinstance(gradient, fx.Node) and gradient.meta["val"].is_contiguous()
        whole = zeros.meta["val"].shape[0] == node.meta["val"].shape[0] == math.prod(expand.meta["val"].shape[:-2])
        return user if plain and whole else None
    return None


def _sunk(expand: fx.Node) -> Change | None:
    """Move the expansion, and views of it, to where it is read first; None where it stands there already."""
    order = {node: number for number, node in enumerate(expand.graph.nodes)}
    chain = [expand]
    while len(chain[-1].users) == 1 and next(iter(chain[-1].users)).target in VIEWS:
        chain.append(next(iter(chain[-1].users)))
    if not chain[-1].users:
        return None
    first = min(chain[-1].users, key=order.__getitem__)
    if first.op == "output" or order[first] - order[expand] <= len(chain):
        return None
    for node in chain:
        first.prepend(node)
    return Change(f"{expand.name} expanded where {first.name} reads it", (expand.name,), (expand.name,))
