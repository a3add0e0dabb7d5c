"""Running operators by themselves, on made-up operands of the same layout, for their bytes and their time."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.result_memory import as_run
from memopt.memory.allocator_events import Recording
from memopt.memory.cost.devices import CPU, Device
from memopt.memory.cost.key import processor_name
from memopt.memory.cost.roofline import is_light, operands_of, span
from memopt.memory.cost.scratch import most_workspace_bytes
from memopt.patterns.product_sums import ADD_PRODUCT, ADD_PRODUCT_OVER
from memopt.program import tensors_of
from memopt.torch_compat import pytree
from memopt.torch_compat.cuda_memory import free_workspaces
from memopt.torch_compat.dispatch import no_autocast
from memopt.torch_compat.fake_tensors import no_fake_mode

_ALIGNMENT = 64  # elements between two inputs that share a buffer
_REPEATS = 5
_LONG_ENOUGH = 0.05  # seconds of a CPU operator beside which what its first call does once is nothing
_CACHE_BYTES = 256 * 2**20  # more than any CUDA device's second-level cache holds
_WARM_UP = 100  # fills of that many bytes, about 10 ms: clocks rise from idle
# Elements of the additions from which the speed of memory is read: in each cache, beyond, and so large that a CPU's
# allocator asks the system for fresh pages each time (from 32 MiB in glibc).
_SIZES = (1, 2**12, 2**15, 2**18, 2**20, 2**22, 2**23, 2**24)
_MATRIX = {"cuda": 4096, "cpu": 256}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one call took.

    Attributes:
        seconds: the least of a few calls, as others may use the device meanwhile; None for operators whose time is not
            measured (`roofline.is_light`), and where memory was short for timing.
        workspace_bytes: the most bytes alive at once while it ran, above its inputs and its results.
        output_bytes: bytes that its results took of the allocator.
    """

    seconds: float | None
    workspace_bytes: int
    output_bytes: int


def clock_bytes(device: torch.device) -> int:
    """Bytes that are held on the device for as long as anything is timed."""
    return _CACHE_BYTES if device.type == "cuda" else 0


def bytes_needed(node: fx.Node) -> int:
    """Bytes of the operands and results with which the node's operator runs."""
    return sum(span(tensor) * tensor.element_size() for tensor in (*tensors_of(node), *operands_of(node)))


def measure_operators(nodes: Sequence[fx.Node], device: torch.device, limit_bytes: int) -> list[Measured | None]:
    """Run operators that have no effects; None for those that refuse made-up operands or that memory is short for.

    The random state is left as it was; on CUDA memory is handed back to the driver afterwards.

    Args:
        nodes: their call nodes.
        device: where they run.
        limit_bytes: the most bytes of operands, results and workspaces as they are estimated at once, but of a node
            that needs more by itself.

    Raises:
        RuntimeError: a profiler is active in this thread.
    """
    found: list[Measured | None] = []
    with _by_itself(device, nodes):
        for group in _groups(nodes, limit_bytes):
            found += _measure_group(group, device)
    return found


@contextlib.contextmanager
def _by_itself(device: torch.device, nodes: Sequence[fx.Node] = ()) -> Iterator[None]:
    """Real tensors, no autocast, no gradients, the random state kept; nothing cached by CUDA's allocator."""
    cuda = {t.device.index for node in nodes for t in (*tensors_of(node), *operands_of(node)) if t.is_cuda}
    if device.type == "cuda":
        cuda.add(device.index)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_fake_mode())
        stack.enter_context(no_autocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=sorted(cuda)))
        for leaf in pytree.tree_leaves([(node.args, node.kwargs) for node in nodes]):
            if isinstance(leaf, torch.Generator):  # the user's own, which the model draws from
                stack.callback(leaf.set_state, leaf.get_state())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.empty_cache()
            stack.callback(torch.cuda.empty_cache)
            stack.callback(free_workspaces)  # a step that multiplies nothing goes without
        yield


def _groups(nodes: Sequence[fx.Node], limit_bytes: int) -> Iterator[list[fx.Node]]:
    """Cut the nodes into runs whose shared buffers, beside the largest results and workspaces, stay within it."""
    group: list[fx.Node] = []
    buffers: dict[Kind, int] = {}
    results = 0
    for node in nodes:
        own = _sizes([node])
        together = {kind: max(own.get(kind, 0), buffers.get(kind, 0)) for kind in {*own, *buffers}}
        mine = bytes_needed(node) - _bytes(own) + most_workspace_bytes(node)
        if group and max(results, mine) + _bytes(together) > limit_bytes:
            yield group
            group, together, results = [], own, 0
        group.append(node)
        buffers, results = together, max(results, mine)
    if group:
        yield group


def _measure_group(nodes: Sequence[fx.Node], device: torch.device) -> list[Measured | None]:
    """Run each operator for its bytes, all in one profiler session, then those that take long for their time."""
    walls: dict[int, float] = {}
    recording = Recording(device)

    def session() -> None:
        for index, node in enumerate(nodes):
            args, kwargs = inputs.arguments(node)
            target = _as_run(node)
            try:
                for _ in range(2):  # the second call finds its primitives cached, as a steady step does; its mark stays
                    began = time.perf_counter()
                    recording.mark(f"begin {index}")
                    result = target(*args, **kwargs)
                    wall = time.perf_counter() - began
                    recording.mark(f"end {index}")
                    del result
                    walls[index] = wall
                    if device.type == "cpu" and wall > _LONG_ENOUGH:
                        break
            except (RuntimeError, IndexError, ValueError):
                walls.pop(index, None)  # zeros are not valid indices for every operator, and memory may be short

    try:
        inputs = _Inputs(nodes)
    except RuntimeError:  # not even the operands fit
        return [None] * len(nodes)
    with recording:
        session()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    times = [time for time, _ in recording.changes]
    clock = _clock(device) if any(index in walls and not is_light(node) for index, node in enumerate(nodes)) else None
    found: list[Measured | None] = []
    for index, node in enumerate(nodes):
        if index not in walls:
            found.append(None)
            continue
        begin, end = recording.marks[f"begin {index}"], recording.marks[f"end {index}"]
        changes = recording.changes[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        sums = [0, *itertools.accumulate(size for _, size in changes)]
        taken = None if is_light(node) else _timed(node, inputs, device, clock, walls[index])
        found.append(Measured(taken, max(sums) - max(0, sums[-1]), max(0, sums[-1])))
    return found


def _as_run(node: fx.Node) -> Callable[..., Any]:
    """The form of the node's operator that engines run; of a sum of products the one that writes over the sum."""
    return ADD_PRODUCT_OVER if node.target is ADD_PRODUCT else as_run(node.target)


def _timed(node: fx.Node, inputs: _Inputs, device: torch.device, clock: _Clock | None, wall: float) -> float | None:
    if device.type == "cpu" and wall > _LONG_ENOUGH:
        return wall
    args, kwargs = inputs.arguments(node)
    target = _as_run(node)
    try:
        return None if clock is None else clock.least(lambda: target(*args, **kwargs))
    except RuntimeError:  # memory is short beside what the clock holds
        return None


def _clock(device: torch.device) -> _Clock | None:
    try:
        return _Clock(device)
    except RuntimeError:  # memory is short
        return None


class _Clock:
    """Times calls: by the wall on CPU, by the device's own events on CUDA, there with cold caches and rising clocks."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
            for _ in range(_WARM_UP):
                self.cache.zero_()

    def least(self, call: Callable[[], Any], calls: int = 1) -> float:
        """The least time of `call()`, which has run before and makes `calls` equal calls."""
        return min(self._on_cuda(call) if self.cuda else self._on_cpu(call)) / calls

    def _on_cpu(self, call: Callable[[], Any]) -> list[float]:
        samples: list[float] = []
        while len(samples) < _REPEATS and sum(samples) < _LONG_ENOUGH:
            began = time.perf_counter()
            call()
            samples.append(time.perf_counter() - began)
        return samples

    def _on_cuda(self, call: Callable[[], Any]) -> list[float]:
        pairs = []
        for _ in range(_REPEATS):
            # While the device fills this, the call is already launched: what is timed is the device's work alone.
            self.cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


Kind = tuple[torch.dtype, torch.device]


class _Inputs:
    """Operands for one operator at a time, laid out in shared buffers: random floats, zeros of other types.

    Zeros are valid indices. Operators are functional, so no operator spoils the next one's operands.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.buffers = {kind: _filled(size, *kind) for kind, size in _sizes(nodes).items()}

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real positional and keyword arguments for the node's operator; equal nodes give the same tensor."""
        used: dict[Kind, int] = {}

        def place(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            kind = value.dtype, value.device
            offset = used.get(kind, 0)
            used[kind] = offset + _rounded(span(value))
            return self.buffers[kind].as_strided(value.shape, value.stride(), offset)

        placed = {argument: pytree.tree_map(place, argument.meta["val"]) for argument in node.all_input_nodes}
        return fx.map_arg((node.args, dict(node.kwargs)), lambda argument: placed[argument])


def _sizes(nodes: Sequence[fx.Node]) -> dict[Kind, int]:
    """Elements of the shared buffers that serve each of the nodes in turn."""
    largest: dict[Kind, int] = {}
    for node in nodes:
        sizes: dict[Kind, int] = {}
        for tensor in operands_of(node):
            kind = tensor.dtype, tensor.device
            sizes[kind] = sizes.get(kind, 0) + _rounded(span(tensor))
        for kind, size in sizes.items():
            largest[kind] = max(size, largest.get(kind, 0))
    return largest


def _bytes(sizes: dict[Kind, int]) -> int:
    return sum(size * dtype.itemsize for (dtype, _), size in sizes.items())


def _rounded(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def _filled(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    buffer = torch.zeros(elements, dtype=dtype, device=device)
    if dtype.is_complex:
        torch.view_as_real(buffer).uniform_(0.1, 1.0)
    elif dtype.is_floating_point and dtype.itemsize > 1:
        buffer.uniform_(0.1, 1.0)
    return buffer


# -- the device itself ----------------------------------------------------------------------------------------------

# More than `calibrate` holds at once, beside the clock.
CALIBRATION_BYTES = 2**28


def calibrate(device: torch.device) -> Device:
    """Measure what bounds the speed of a device of this machine: additions of growing size, and matrix products.

    Raises:
        RuntimeError: its memory is short.
    """
    with _by_itself(device):
        clock = _Clock(device)
        data = torch.ones(max(_SIZES), device=device)
        points: list[tuple[int, float]] = []
        for size in _SIZES:
            operand = data[:size]
            repeats = 1 if size > 2**15 else 16  # short calls are timed several together
            _call(operand, 1)()
            taken = clock.least(_call(operand, repeats), repeats)
            points.append((3 * operand.nbytes, max(taken, *(seconds for _, seconds in points), 0.0)))
        rates = dict(CPU.flops)
        side = _MATRIX[device.type]
        for dtype in _DTYPES:
            left = torch.full((side, side), 0.5, dtype=dtype, device=device)
            product = _product(left)
            product()
            rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / clock.least(product)
    on_cuda = device.type == "cuda"
    rates["tf32"] = max(rates["float32"], rates["bfloat16"] / 2) if on_cuda else rates["float32"]
    rates["float64"] = rates["float32"] / 2
    title = torch.cuda.get_device_name(device) if on_cuda else processor_name()
    bandwidth = points[-1][0] / points[-1][1]
    return Device(str(device), title, device.type, rates, bandwidth, reached=(1.0, 1.0, 1.0), traffic=tuple(points))


def _call(operand: torch.Tensor, repeats: int) -> Callable[[], None]:
    def call() -> None:
        for _ in range(repeats):
            torch.add(operand, operand)

    return call


def _product(left: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.mm(left, left)
