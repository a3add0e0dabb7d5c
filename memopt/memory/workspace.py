"""What an operator takes while it runs, beyond its results: found by running it once on inputs of the same layout."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from memopt.memory.measure import record
from memopt.program import Program, is_effectful, is_random, is_view, tensors_of

_ALIGNMENT = 64  # elements between two inputs that share a buffer
_LONG_ENOUGH = 0.05  # seconds of a CPU operator beside which what its first call does once is nothing


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """What one call of an operator takes.

    Attributes:
        seconds: time of one call once caches are warm.
        workspace_bytes: the most bytes alive at once while it runs, above its inputs and its results.
        output_bytes: bytes that its results took of the allocator; 0 for views.
        measured: whether the operator was run; else the figures are estimates.
    """

    seconds: float
    workspace_bytes: int
    output_bytes: int
    measured: bool


class WorkspaceTable:
    """Costs of operators, measured once per operator, shapes, strides, dtypes, devices and other arguments.

    Operators that have effects outside the program are never run, nor are those whose device is not here, or whose
    inputs and results are larger than the limit: these are estimated. Random operators are run, and the random state is
    put back.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Make an empty table.

        Args:
            limit_bytes: the most bytes of inputs and results with which an operator is run. None means 2 GiB on CPU and
                half of the free memory on CUDA.
        """
        self.limit_bytes = limit_bytes
        self._costs: dict[Any, OperatorCost] = {}

    def measure(self, node: fx.Node) -> int:
        """Return the workspace in bytes of one call node."""
        return self.cost(node).workspace_bytes

    def cost(self, node: fx.Node) -> OperatorCost:
        """Return what one call node takes, running it if the table has no equal one."""
        return self._look_up([node])[node.name]

    def measure_all(self, program: Program) -> dict[str, OperatorCost]:
        """Return what every call node takes, by name. Operators not yet in the table are run in one profiler session.

        Raises:
            RuntimeError: a profiler is active in this thread.
        """
        return self._look_up(program.calls)

    def _look_up(self, nodes: Sequence[fx.Node]) -> dict[str, OperatorCost]:
        keys = {node.name: key_of(node) for node in nodes}
        missing: dict[torch.device, dict[Any, fx.Node]] = {}
        for node in nodes:
            key = keys[node.name]
            if key in self._costs:
                continue
            if _makes_nothing(node):
                self._costs[key] = OperatorCost(0.0, 0, 0, False)
            elif self._may_run(node):
                missing.setdefault(tensors_of(node)[0].device, {}).setdefault(key, node)
            else:
                self._costs[key] = estimate(node)
        for device, group in missing.items():
            self._costs.update(zip(group, _run(list(group.values()), device), strict=True))
        return {name: self._costs[key] for name, key in keys.items()}

    def _may_run(self, node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or "c10d" in node.target.namespace:
            return False  # a collective would wait for the other ranks
        if is_effectful(node) and not is_random(node):
            return False
        tensors = [*tensors_of(node), *_operands(node)]
        if not all(_is_here(tensor) for tensor in tensors):
            return False
        limit = self.limit_bytes
        if limit is None:
            limit = torch.cuda.mem_get_info()[0] // 2 if any(t.is_cuda for t in tensors) else 2**31
        return sum(_span(t) * t.element_size() for t in tensors) <= limit


def key_of(node: fx.Node) -> Any:
    """What the cost of a call node depends on: operator, layout of its operands, which of them are the same, the rest.

    Nodes with equal keys have equal costs.
    """
    seen: dict[fx.Node, int] = {}

    def freeze(value: Any) -> Any:
        if isinstance(value, fx.Node):
            number = seen.setdefault(value, len(seen))
            leaves = pytree.tree_leaves(value.meta.get("val"))
            return number, tuple(_layout(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        if isinstance(value, Mapping):
            return tuple((key, freeze(item)) for key, item in value.items())
        return type(value), repr(value)

    return node.target, freeze(node.args), freeze(node.kwargs)


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.device
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _makes_nothing(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node) or not tensors_of(node)


def _is_here(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.device.type == "cpu" or (tensor.device.type == "cuda" and torch.cuda.is_available())


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that the layout reaches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# -- running --------------------------------------------------------------------------------------------------------


def _run(nodes: list[fx.Node], device: torch.device) -> list[OperatorCost]:
    """Run each operator, all in one profiler session."""
    clocks: dict[int, _Clock] = {}

    def session() -> None:
        for index, node in enumerate(nodes):
            args, kwargs = inputs.arguments(node)
            try:
                for _ in range(2):  # the second call finds its primitives cached, as a steady step does; its mark stays
                    clock = _Clock(device)
                    with torch.profiler.record_function(f"memopt {index}"):
                        result = node.target(*args, **kwargs)  # type: ignore[operator]
                        clock.stop()
                    del result
                    clocks[index] = clock
                    if clock.end - clock.begin > _LONG_ENOUGH:
                        break
            except (RuntimeError, IndexError, ValueError):
                clocks.pop(index, None)  # zeros are not valid indices for every operator, and memory may be short

    cuda = sorted({t.device.index for node in nodes for t in (*tensors_of(node), *_operands(node)) if t.is_cuda})
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        inputs = _Inputs(nodes)
        trace = record(session, device)
    times = [time for time, _ in trace.changes]
    costs = []
    for index, node in enumerate(nodes):
        if index not in clocks:
            costs.append(estimate(node))
            continue
        begin, end = trace.marks[f"memopt {index}"]
        changes = trace.changes[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        sums = [0, *itertools.accumulate(size for _, size in changes)]
        costs.append(OperatorCost(clocks[index].seconds(), max(sums) - max(0, sums[-1]), max(0, sums[-1]), True))
    return costs


class _Clock:
    """Times one call: by the wall on CPU, by the device's own events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[Any] = []
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self.begin = self.end = 0.0
        if self.events:
            self.events[0].record()
        else:
            self.begin = time.perf_counter()

    def stop(self) -> None:
        if self.events:
            self.events[1].record()
        else:
            self.end = time.perf_counter()

    def seconds(self) -> float:
        """The time between start and stop; on CUDA the device must be synchronized."""
        return self.events[0].elapsed_time(self.events[1]) / 1000 if self.events else self.end - self.begin


class _Inputs:
    """Operands for one operator at a time, laid out in shared buffers: random floats, zeros of other types.

    Zeros are valid indices. Operators are functional, so no operator spoils the next one's operands.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for node in nodes:
            for kind, size in self._sizes(node).items():
                sizes[kind] = max(size, sizes.get(kind, 0))
        self.buffers = {kind: _filled(size, *kind) for kind, size in sizes.items()}

    def _sizes(self, node: fx.Node) -> dict[tuple[torch.dtype, torch.device], int]:
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for tensor in _operands(node):
            kind = tensor.dtype, tensor.device
            sizes[kind] = sizes.get(kind, 0) + _rounded(_span(tensor))
        return sizes

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real positional and keyword arguments for the node's operator; equal nodes give the same tensor."""
        used: dict[tuple[torch.dtype, torch.device], int] = {}

        def place(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            kind = value.dtype, value.device
            offset = used.get(kind, 0)
            used[kind] = offset + _rounded(_span(value))
            return self.buffers[kind].as_strided(value.shape, value.stride(), offset)

        placed = {argument: pytree.tree_map(place, argument.meta["val"]) for argument in node.all_input_nodes}
        return fx.map_arg((node.args, dict(node.kwargs)), lambda argument: placed[argument])


def _rounded(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def _filled(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    buffer = torch.zeros(elements, dtype=dtype, device=device)
    if dtype.is_complex:
        torch.view_as_real(buffer).uniform_(0.1, 1.0)
    elif dtype.is_floating_point and dtype.itemsize > 1:
        buffer.uniform_(0.1, 1.0)
    return buffer


# -- estimates ------------------------------------------------------------------------------------------------------

# Sustained rates by device type, (operations per second, bytes per second): orders of magnitude, for plans made
# without the device.
_RATES = {"cuda": (3e14, 2e12), "cpu": (5e10, 1e10)}

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


def estimate(node: fx.Node) -> OperatorCost:
    """Return the cost of a call node without running it.

    Seconds are the larger of arithmetic and traffic at typical rates of the device. Workspace is that of the operators
    that are known to need much: convolutions reorder their operands, sorting keeps a second copy of its results,
    the backward of attention accumulates the query's gradient apart; others count as needing none.
    """
    results = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(node)}
    operands = [_span(tensor) * tensor.element_size() for tensor in _operands(node)]
    if _makes_nothing(node):
        return OperatorCost(0.0, 0, 0, False)
    output = sum(results.values())
    workspace = 0
    if node.target in _CONVOLUTIONS:
        workspace = sum(operands)
    elif node.target in _SORTS:
        workspace = output
    elif "attention" in str(node.target) and "backward" in str(node.target):
        workspace = _span(tensors_of(node)[0]) * tensors_of(node)[0].element_size()
    arithmetic, traffic = _RATES.get(tensors_of(node)[0].device.type, _RATES["cpu"])
    seconds = max(_flops(node) / arithmetic, (sum(operands) + output) / traffic)
    return OperatorCost(seconds, workspace, output, False)


def _flops(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
