"""`memopt.monitor`: what fills the device around any loop, and what was there when it was too little."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memopt.budget import parse_budget
from memopt.memory.live_tensors import live_tensors
from memopt.memory.step_watch import StepWatch
from memopt.monitoring.fixes import Call, fixes
from memopt.monitoring.groups import grouped, weights
from memopt.monitoring.leaks import find_leaks
from memopt.monitoring.lines import Place, in_backward, place_of_error, said
from memopt.monitoring.meters import CudaMeter, Meter, TrackerMeter
from memopt.monitoring.modules import ModuleWatch
from memopt.monitoring.page import to_html, to_json
from memopt.monitoring.record import Filled, Leak, ModuleMemory, OutOfMemory, StepMemory
from memopt.monitoring.text import short_lines, to_text
from memopt.monitoring.tracker import Made, Origin, Tracker
from memopt.report.files import write_whole
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.modules import called_in

SCHEMA = 1
WARM_UP = 2  # steps that do not count for drift: state of optimizers and caches come in them
_SAID = "memopt.monitor:"


class Monitor:
    """Says what fills a device's memory while a loop runs within `with`; its numbers and draws stay as they are.

        with memopt.monitor() as m:
            for batch in batches:
                …
        print(m)
        m.save("monitor.html")

    A step ends when an optimizer has stepped, or where the loop calls `step()`. Tensors are followed in the thread that
    enters, and in autograd's work for it. On a CPU sizes are those asked for, and buffers within compiled code are not
    seen. On CUDA steps are measured by the allocator, whose peaks (`torch.cuda.max_memory_allocated`) are reset as each
    step begins. An error of too little memory (`torch.OutOfMemoryError`) gets a note of what was there.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        limit: str | int | None = None,
        plan: bool = True,
    ) -> None:
        """Nothing is looked at before `with`.

        Args:
            device: what is looked at: "cpu" or a CUDA device; None: the current CUDA device, where there is one.
            limit: bytes that the device is to hold, for what helps when memory runs out ("20GB"); None: on CUDA what
                other processes leave of the device.
            plan: whether memopt's planner is asked what would help when memory runs out: seconds, for large models
                minutes.

        Raises:
            ValueError: the device is neither CPU nor CUDA, or the limit is not understood or a fraction.
        """
        self._device = _device(device)
        self._limit = None if limit is None else _bytes(limit)
        self._plan = plan
        self._steps: list[StepMemory] = []
        self._modules = ModuleWatch(self._called)
        self._tracker = Tracker(self._device, self._modules, self._short)
        self._meter: Meter = TrackerMeter(self._tracker)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._mode = contextlib.ExitStack()
        self._call: Call | None = None
        self._by_hand = False
        self._state = "new"
        self._began, self._before = 0.0, 0
        self._highest: tuple[int, Filled] = (-1, Filled(0, ()))
        self._at_peak: list[Made] = []
        self._leaks: tuple[Leak, ...] = ()
        self._ran_out: OutOfMemory | None = None
        self._ran_out_at = -1  # of births

    # -- the loop ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        if self._state != "new":
            raise RuntimeError("a monitor looks at one block: make another one by memopt.monitor()")
        self._state = "running"
        gc.collect()  # what is garbage by now must not count as held
        self._tracker.see(live_tensors(), "before")
        if self._device.type == "cuda":
            self._meter = CudaMeter(self._device)
        self._begins = register_optimizer_step_pre_hook(self._optimizer_begins)
        _watch.add(self)
        self._mode.enter_context(self._tracker)
        self._tracker.peak, self._tracker.peak_birth = self._tracker.live, self._tracker.births
        self._before, self._began = self._meter.held(), time.perf_counter()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._mode.close()
        finally:
            self._begins.remove()
            _watch.remove(self)
            self._meter.close()
            self._state = "over"
        if isinstance(error, torch.OutOfMemoryError):
            self._note(error)
        else:
            self._leaks = self._find_leaks()
        self._keep_peak(self._meter.most().peak, self._tracker.peak)
        self._tracker.references.clear()  # what is known stays as it is now
        self._tracker.made.clear()
        self._tracker.gone.clear()

    def step(self) -> None:
        """The loop says that a step has ended: one without an optimizer, or with several. Optimizers then end none.

        Raises:
            RuntimeError: outside of the monitor's block.
        """
        if self._state != "running":
            raise RuntimeError("step() is called within the monitor's block")
        if not self._by_hand:
            self._by_hand = True
            self._end_step()
            self._steps = [_merged(self._steps)]  # optimizers have ended some within the first
        else:
            self._end_step()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, as the hook of all optimizers says."""
        if _is_real(optimizer):
            self._tracker.stepping = False
            self._optimizers.add(optimizer)
            if not self._by_hand:
                self._end_step()

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and _is_real(optimizer):
            self._optimizers.add(optimizer)
            self._tracker.stepping = True

    def _end_step(self) -> None:
        most, held, now = self._meter.most(), self._meter.held(), time.perf_counter()
        lost = None if most.reserved is None else most.reserved - most.peak
        seconds = now - self._began
        self._steps.append(StepMemory(len(self._steps), self._before, most.peak, held, seconds, most.reserved, lost))
        self._keep_peak(most.peak, self._tracker.peak)
        self._tracker.next_step()
        self._meter.begin()
        self._before, self._began = held, time.perf_counter()

    def _keep_peak(self, peak: int, seen: int) -> None:
        """Remember what filled the device, where it held more than ever."""
        if peak > self._highest[0]:
            self._name_weights()
            unseen = max(0, peak - seen) if self._device.type == "cuda" else 0
            self._highest = peak, Filled(peak, (), unseen)
            self._at_peak = self._tracker.at_peak()

    def _name_weights(self) -> None:
        for key, (what, name) in weights(self._modules.models(), list(self._optimizers)).items():
            made = self._tracker.made.get(key)
            if made is not None and made.origin.phase != what:
                made.origin = Origin(what, name, ("", 0), None, made.origin.shape, made.origin.dtype)

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training or self._call is None:
            self._call = Call.of(module, args, kwargs)

    # -- what was found ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """What is looked at."""
        return self._device

    @property
    def steps(self) -> list[StepMemory]:
        """The steps that have ended."""
        return list(self._steps)

    @property
    def modules(self) -> tuple[ModuleMemory, ...]:
        """The modules that were called, in the order of their first calls. Of compiled code the outermost alone."""
        return self._modules.records()

    @property
    def filled(self) -> Filled:
        """What the device held at the highest peak."""
        return dataclasses.replace(self._highest[1], tensors=grouped(self._at_peak))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors at once."""
        return max([self._highest[0], *(step.peak for step in self._steps)])

    @property
    def drift_bytes(self) -> int:
        """Bytes that are held more after each step than after the step before: on average of the later half of steps.

        0 with fewer than two steps after the first two, which are warm-up.
        """
        steady = self._steps[max(WARM_UP, len(self._steps) // 2) :]
        if len(steady) < 2:
            return 0
        return round((steady[-1].held_after - steady[0].held_after) / (len(steady) - 1))

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """Tensors of which each step leaves more, those of most bytes first; none of what goes after some steps."""
        return self._find_leaks() if self._state == "running" else self._leaks

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """The last time when memory ran out within the block; None for never."""
        return self._ran_out

    def _find_leaks(self) -> tuple[Leak, ...]:
        self._name_weights()
        return find_leaks(self._tracker, len(self._steps))

    # -- too little memory ------------------------------------------------------------------------------------------

    def _short(self, error: torch.OutOfMemoryError) -> None:
        """An operator has met the error: look at once, as what it interrupts goes."""
        phase, place, names = self._tracker.look()
        self._look_around(error, phase, place, names[-1] if names else "")

    def _look_around(self, error: torch.OutOfMemoryError, phase: str, place: Place, module: str) -> None:
        self._ran_out_at = self._tracker.births
        self._name_weights()
        held, seen = self._meter.held(), self._tracker.live
        reserved = others = capacity = None
        if self._device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self._device)
            free, capacity = torch.cuda.mem_get_info(self._device)
            others = max(0, capacity - free - reserved)
        filled = Filled(held, grouped(self._tracker.made.values()), 0 if reserved is None else max(0, held - seen))
        what, step = str(error).partition("\n")[0], len(self._steps)
        self._ran_out = OutOfMemory(what, step, phase, module, said(place), filled, reserved, others, capacity)

    def _note(self, error: torch.OutOfMemoryError) -> None:
        if self._ran_out_at != self._tracker.births or self._ran_out is None:
            self._tracker.see(live_tensors(), "unseen")
            module = next(filter(None, map(self._modules.name_of, called_in(error))), "")
            phase = "optimizer" if self._tracker.stepping else "forward" if module else "loop"
            phase = "backward" if in_backward(error) else phase
            self._look_around(error, phase, place_of_error(error), module)
        self._leaks = self._find_leaks()
        assert self._ran_out is not None
        found = fixes(
            self._ran_out,
            self._leaks,
            self._limit,
            self._call if self._plan else None,
            list(self._optimizers),
        )
        self._ran_out = dataclasses.replace(self._ran_out, fixes=found)
        if not any(note.startswith(_SAID) for note in getattr(error, "__notes__", ())):
            note = "\n".join((_SAID, *short_lines(self._ran_out)))
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                error.args = (f"{error}\n{note}",)

    # -- for people and files ---------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Steps, modules, leaks and what filled the device, in short tables."""
        return to_text(self)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data; `schema` is the version of its form."""
        return {
            "schema": SCHEMA,
            "device": str(self._device),
            "steps": [dataclasses.asdict(step) for step in self._steps],
            "modules": [dataclasses.asdict(module) for module in self.modules],
            "drift_bytes": self.drift_bytes,
            "leaks": [dataclasses.asdict(leak) for leak in self.leaks],
            "peak_bytes": self.peak_bytes,
            "filled": dataclasses.asdict(self.filled),
            "out_of_memory": None if self._ran_out is None else dataclasses.asdict(self._ran_out),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it whole as a page (`.html`), as JSON (`.json`), or as text (any other name).

        Raises:
            OSError: the folder does not exist or is not writable.
        """
        form = os.fspath(path).rpartition(".")[2]
        write_whole(path, {"html": to_html, "json": to_json}.get(form, to_text)(self).rstrip("\n") + "\n")


def monitor(*, device: torch.device | str | None = None, limit: str | int | None = None, plan: bool = True) -> Monitor:
    """`with memopt.monitor() as m:` around a loop says what fills a device's memory; arguments as of `Monitor`."""
    return Monitor(device=device, limit=limit, plan=plan)


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    for monitor in _watch:
        monitor.optimizer_stepped(optimizer)


_watch: StepWatch[Monitor] = StepWatch(_stepped)


def _is_real(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is not one of memopt's, which plans on fake tensors."""
    return not any(isinstance(p, FakeTensor) for group in optimizer.param_groups for p in group["params"])


def _merged(steps: list[StepMemory]) -> StepMemory:
    first, last = steps[0], steps[-1]
    reserved = None if last.reserved is None else max(step.reserved or 0 for step in steps)
    peak = max(step.peak for step in steps)
    lost = None if reserved is None else reserved - peak
    return StepMemory(0, first.held_before, peak, last.held_after, sum(s.seconds for s in steps), reserved, lost)


def _device(device: torch.device | str | None) -> torch.device:
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"monitor() knows cpu and cuda, not {found}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _bytes(limit: str | int) -> int:
    size = parse_budget(limit).bytes
    if size is None:
        raise ValueError(f"limit takes bytes as '20GB', not the fraction {limit!r}")
    return size
