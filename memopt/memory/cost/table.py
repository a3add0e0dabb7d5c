"""What each operator takes: looked up, found on disk, measured here once, or estimated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.common.phases import phase
from memopt.memory.allocator_events import is_profiled
from memopt.memory.cost.devices import Device, typical
from memopt.memory.cost.disk import Record, Store
from memopt.memory.cost.elsewhere import moved
from memopt.memory.cost.key import key_of, place_of
from memopt.memory.cost.link import LINK_BYTES, measure_link
from memopt.memory.cost.measure import (
    CALIBRATION_BYTES,
    Measured,
    bytes_needed,
    calibrate,
    clock_bytes,
    measure_operators,
)
from memopt.memory.cost.roofline import is_light, makes_nothing, operands_of, seconds
from memopt.memory.cost.scratch import output_bytes, workspace_bytes
from memopt.memory.cost.slices import batch_of, extrapolated, has_slices, slices_of
from memopt.program import Program, is_effectful, is_random, tensors_of
from memopt.torch_compat.operators import OpOverload

_ON_CPU = 2**31  # bytes with which an operator is run on CPU unless a limit is given
_CALIBRATION, _LINK = "calibration", "link"


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """What one call of an operator takes.

    Attributes:
        seconds: time of one call once caches are warm.
        workspace_bytes: the most bytes alive at once while it runs, above its inputs and its results.
        output_bytes: bytes that its results took of the allocator; 0 for views.
        measured: whether the bytes are those of a run; else they are estimates.
        timed: whether `seconds` was measured; else it is the roofline's.
    """

    seconds: float
    workspace_bytes: int
    output_bytes: int
    measured: bool
    timed: bool = False


class CostTable:
    """Costs of operators by operator, layout of the operands and other arguments (`key_of`), device and settings.

    An operator is run once for its bytes and, unless it only moves them (`roofline.is_light`), a few times for its
    time; what was found is kept on disk for the next process. Operators that have effects outside the program are never
    run, nor are those whose device is not here, or whose inputs and results are larger than the limit: these are
    estimated. Random operators are run, and the random state is put back.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        *,
        ceiling_bytes: int | None = None,
        available: Callable[[], int | None] | None = None,
        target: Device | None = None,
        estimates: bool = False,
    ) -> None:
        """Make an empty table.

        Args:
            limit_bytes: the most bytes of inputs and results with which an operator is run. None means 2 GiB on CPU and
                half of the free memory on CUDA.
            ceiling_bytes: the most bytes that may be allocated on a device while operators are run, all that is there
                already included. None: no more than that half.
            available: of the bytes that operators may take now beside what is resident; None: no limit.
            target: the device to plan for, in place of this machine's: nothing is run.
            estimates: whether what cannot be run for now, as a profiler is active, is estimated until it can be.
        """
        self.limit_bytes, self.ceiling_bytes, self.target = limit_bytes, ceiling_bytes, target
        self._estimates, self._available = estimates, available
        self._costs: dict[tuple[str, str], OperatorCost] = {}
        self._devices: dict[str, Device] = {}
        self._links: dict[str, tuple[float, float]] = {}
        self._store = Store("costs")

    def measure(self, node: fx.Node) -> int:
        """Return the workspace in bytes of one call node."""
        return self.cost(node).workspace_bytes

    def cost(self, node: fx.Node) -> OperatorCost:
        """Return what one call node takes, running it if the table has no equal one."""
        return self._look_up([node])[node.name]

    def known(self, node: fx.Node) -> OperatorCost | None:
        """Return what one call node takes, without running it: None where that is not known yet."""
        return self._look_up([node], run=False).get(node.name)

    def learn(self, nodes: Sequence[fx.Node]) -> None:
        """Find out what call nodes take, be they of several programs: in one go, which takes less time than one by one.

        Raises:
            MeasuringError: a profiler is active in this thread, something has to be run, and nothing is estimated.
        """
        self._look_up(nodes)

    def workspaces(self, nodes: Sequence[fx.Node]) -> list[int]:
        """The workspace in bytes of each of these call nodes; an estimate where a profiler keeps it from being run."""
        if is_profiled():
            return [self._for_now(node) for node in nodes]
        self.learn(nodes)
        return [self.measure(node) for node in nodes]

    def _for_now(self, node: fx.Node) -> int:
        known = self.known(node) or self._estimate(node, self._place(_device_of(node)))
        return known.workspace_bytes

    def measure_all(self, program: Program) -> dict[str, OperatorCost]:
        """Return what every call node takes, by name. Operators not yet known are run in one profiler session.

        Raises:
            MeasuringError: a profiler is active in this thread, something has to be run, and nothing is estimated.
        """
        return self._look_up(program.calls)

    def device(self, node: fx.Node) -> Device:
        """Return the figures of the device that the node runs on: the target's, or those of this machine's."""
        device = _device_of(node)
        return self._device(device, self._place(device))

    def link(self, device: torch.device) -> tuple[float, float]:
        """Bytes per second from the device to the host's pinned memory, and back; 0 on a CPU, which has no other.

        Measured once on a CUDA device of this machine.
        """
        if self.target is not None:
            return self.target.link
        if device.type != "cuda" or not _is_here(device):
            return typical(device.type).link
        place = self._place(device)
        if place not in self._links:
            self._links[place] = self._measured_link(device, place)
        return self._links[place]

    def placed(self, program: Program) -> Program:
        """Return the program on the device that is planned for: itself unless the table has a target."""
        return program if self.target is None else moved(program, self.target.type)

    # -- inside --------------------------------------------------------------------------------------------------

    def _look_up(self, nodes: Sequence[fx.Node], *, run: bool = True) -> dict[str, OperatorCost]:
        """What nodes take, by name; those that would have to be run are left out unless `run`."""
        places: dict[torch.device, str] = {}
        keys: dict[str, tuple[str, str]] = {}
        missing: dict[torch.device, dict[tuple[str, str], fx.Node]] = {}
        for node in nodes:
            device = _device_of(node)
            if device not in places:
                places[device] = self._place(device)
            place = places[device]
            keys[node.name] = key = (place, key_of(node))
            if key in self._costs or key in missing.get(device, {}):
                continue
            if makes_nothing(node):
                self._costs[key] = OperatorCost(0.0, 0, 0, False)
            elif not self._runs(node):
                self._costs[key] = self._estimate(node, place)
            elif (known := _measured(self._store.get(*key), node)) is not None:
                self._costs[key] = self._cost(node, place, known)
            elif self._fits(node):
                missing.setdefault(device, {})[key] = node
            elif not has_slices(node):
                self._costs[key] = self._estimate(node, place)
            elif run:
                self._costs[key] = self._sliced(node, place) or self._estimate(node, place)
        for_now: dict[tuple[str, str], OperatorCost] = {}
        for device, group in missing.items() if run else ():
            if self._estimates and is_profiled():
                for_now |= {key: self._estimate(node, key[0]) for key, node in group.items()}
                continue
            with phase("measuring operators"):
                self._run(group, device)
        costs = {**self._costs, **for_now} if for_now else self._costs
        return {name: costs[key] for name, key in keys.items() if key in costs}

    def _run(self, group: dict[tuple[str, str], fx.Node], device: torch.device) -> None:
        for key, node in list(group.items()):  # another process may have left some since, while this one waited
            if (known := _measured(self._store.get(*key), node)) is not None:
                self._costs[key] = self._cost(group.pop(key), key[0], known)
        if not group:
            return
        results = measure_operators(list(group.values()), device, self._limit_now(device))
        for (key, node), result in zip(group.items(), results, strict=True):
            if result is None:
                self._costs[key] = self._estimate(node, key[0])
                continue
            self._costs[key] = self._cost(node, key[0], result)
            if result.seconds is not None or is_light(node):
                self._store.put(*key, dataclasses.asdict(result))

    def _cost(self, node: fx.Node, place: str, found: Measured) -> OperatorCost:
        time = seconds(node, self._device(_device_of(node), place)) if found.seconds is None else found.seconds
        return OperatorCost(time, found.workspace_bytes, found.output_bytes, True, found.seconds is not None)

    def _estimate(self, node: fx.Node, place: str) -> OperatorCost:
        time = seconds(node, self._device(_device_of(node), place))
        return OperatorCost(time, workspace_bytes(node), output_bytes(node), False)

    def _sliced(self, node: fx.Node, place: str) -> OperatorCost | None:
        """What a node takes that is too large to be run now: its workspace by slices; None where they do not tell."""
        parts = () if is_profiled() else slices_of(node)
        slices = next((each for each in parts if all(map(self._fits, each))), None)
        if slices is None:
            return None
        costs = self._look_up(slices)
        found = [(batch_of(each), costs[each.name].workspace_bytes) for each in slices if costs[each.name].measured]
        if len(found) < len(slices):
            return None
        return dataclasses.replace(self._estimate(node, place), workspace_bytes=extrapolated(found, batch_of(node)))

    # -- devices -------------------------------------------------------------------------------------------------

    def _place(self, device: torch.device) -> str:
        """The text by which costs on the device are kept; another device's costs are never kept, so its name does."""
        if self.target is not None or not _is_here(device):
            return str(device)
        return place_of(device)

    def _device(self, device: torch.device, place: str) -> Device:
        """What bounds the speed: the target's figures, else those measured once on this machine."""
        if self.target is not None:
            return self.target
        if place not in self._devices:
            if (
                self._available is not None
                and not self._estimates
                and self.ceiling_bytes is None
                and self._available() is None
            ):
                return typical(device.type)  # a fraction is not known in bytes yet, and may be of less than that takes
            self._devices[place] = self._calibrated(device, place)
        return self._devices[place]

    def _calibrated(self, device: torch.device, place: str) -> Device:
        if not _is_here(device) or self._limit_now(device) < CALIBRATION_BYTES:
            return typical(device.type)
        known = _device_from(self._store.get(place, _CALIBRATION), device)
        if known is not None:
            return known
        try:
            with phase("measuring the device"):
                found = calibrate(device)
        except RuntimeError:  # memory is short
            return typical(device.type)
        self._store.put(place, _CALIBRATION, {"flops": dict(found.flops), "traffic": found.traffic})
        return found

    def _measured_link(self, device: torch.device, place: str) -> tuple[float, float]:
        known = _link_from(self._store.get(place, _LINK))
        if known is not None:
            return known
        if self._limit_now(device) < LINK_BYTES:
            return typical(device.type).link
        try:
            with phase("measuring the device"):
                found = measure_link(device)
        except RuntimeError:  # memory is short, on the device or on the host
            return typical(device.type).link
        self._store.put(place, _LINK, {"to_host": found[0], "from_host": found[1]})
        return found

    def _limit(self, device: torch.device) -> int:
        limit = self.limit_bytes
        if limit is None:
            limit = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _ON_CPU
        if self.ceiling_bytes is not None and device.type == "cuda":  # whose allocator tells what there is
            limit = min(limit, self.ceiling_bytes - torch.cuda.memory_allocated(device))
        return limit - clock_bytes(device)

    def _limit_now(self, device: torch.device) -> int:
        """The same limit, and what planning may take beside what is resident where no allocator tells that."""
        limit, told = self._limit(device), self.ceiling_bytes is not None and device.type == "cuda"
        available = None if self._available is None or told else self._available()
        return limit if available is None else min(limit, available - clock_bytes(device))

    def _runs(self, node: fx.Node) -> bool:
        """Whether the operator can be run here at all, whatever memory that takes."""
        if self.target is not None or not isinstance(node.target, OpOverload):
            return False
        if is_effectful(node) and not is_random(node):
            return False
        tensors = [*tensors_of(node), *operands_of(node)]
        return all(tensor.layout is torch.strided and _is_here(tensor.device) for tensor in tensors)

    def _fits(self, node: fx.Node) -> bool:
        """Whether there is room now for a run of it."""
        return bytes_needed(node) + workspace_bytes(node) <= self._limit_now(_device_of(node))


def _device_of(node: fx.Node) -> torch.device:
    tensors = tensors_of(node)
    return tensors[0].device if tensors else torch.device("cpu")


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


# -- what was on disk -----------------------------------------------------------------------------------------------


def _measured(record: Record | None, node: fx.Node) -> Measured | None:
    """A record as figures; None unless it is what a run of the node could have left."""
    if record is None or set(record) != {"seconds", "workspace_bytes", "output_bytes"}:
        return None
    sizes = record["workspace_bytes"], record["output_bytes"]
    if not all(type(size) is int and size >= 0 for size in sizes):
        return None
    time = record["seconds"]
    if is_light(node) != (time is None) or not (time is None or _is_time(time)):
        return None
    return Measured(time, *sizes)


def _device_from(record: Record | None, device: torch.device) -> Device | None:
    if record is None or set(record) != {"flops", "traffic"}:
        return None
    flops, traffic = record["flops"], record["traffic"]
    plain = typical("cpu")
    if not isinstance(flops, dict) or set(flops) != set(plain.flops) or not all(map(_is_time, flops.values())):
        return None
    if not isinstance(traffic, list) or not traffic or not all(_is_point(point) for point in traffic):
        return None
    points = tuple((size, time) for size, time in traffic)
    if list(points) != sorted(points):
        return None
    return dataclasses.replace(
        plain,
        name=str(device),
        title=str(device),
        type=device.type,
        flops=flops,
        traffic=points,
        reached=(1.0, 1.0, 1.0),
    )


def _link_from(record: Record | None) -> tuple[float, float] | None:
    if record is None or set(record) != {"to_host", "from_host"} or not all(map(_is_time, record.values())):
        return None
    return record["to_host"], record["from_host"]


def _is_time(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and value > 0


def _is_point(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and _is_time(value[1])
