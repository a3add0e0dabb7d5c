"""What a monitor has seen as text: short tables, and the lines that an error carries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.budget import format_bytes
from memopt.memory.breakdown import align
from memopt.monitoring.record import Filled, Leak, ModuleMemory, OutOfMemory, StepMemory, TensorGroup
from memopt.report.curve_table import format_seconds
from memopt.report.text import sparkline

if TYPE_CHECKING:
    from memopt.monitoring.monitor import Monitor

SHOWN = 10


def to_text(monitor: Monitor) -> str:
    """Steps, drift and leaks, modules, and what filled the device; where memory ran out, that first."""
    steps = monitor.steps
    lines = [summary(monitor)]
    if monitor.out_of_memory is not None:
        lines += ["", *short_lines(monitor.out_of_memory)]
    if steps:
        lines += ["", "held after each step:  " + sparkline([step.held_after for step in steps])]
        lines += ["peak of each step:     " + sparkline([step.peak for step in steps])]
        lines += ["", *align([step_head(steps), *map(step_row, some(steps))])]
    lines += ["", *leak_lines(monitor.leaks)]
    if monitor.modules:
        lines += ["", "modules by what they leave saved for backward:"]
        lines += align([MODULE_HEAD, *map(module_row, largest(monitor.modules, SHOWN))], right=(2, 3))
    if monitor.filled.tensors:
        lines += ["", f"what filled the device at the highest peak, {size(monitor.filled.bytes)}:"]
        lines += filled_lines(monitor.filled)
    return "\n".join(lines)


def summary(monitor: Monitor) -> str:
    """One line."""
    count = len(monitor.steps)
    drift = monitor.drift_bytes
    grows = f", {'+' if drift > 0 else '-'}{size(abs(drift))} a step after warm-up" if drift else ""
    return f"{monitor.device}: {count} step{'' if count == 1 else 's'}, peak {size(monitor.peak_bytes)}{grows}"


def short_lines(short: OutOfMemory) -> list[str]:
    """The moment when memory ran out: where, what was there, what helps."""
    where = f" in {short.module}" if short.module else ""
    lines = [f"memory ran out in step {short.step}, {short.phase}{where}: {short.message}"]
    lines += [f"  at {near(short.line)}"] if short.line else []
    if short.reserved is not None and short.capacity is not None and short.others is not None:
        unused = size(max(0, short.reserved - short.filled.bytes))
        of = f"  of {size(short.capacity)}: {size(short.filled.bytes)} tensors, {unused} reserved and unused"
        lines.append(f"{of}, {size(short.others)} not PyTorch's")
    lines += [f"  the tensors that filled the device, {size(short.filled.bytes)}:"]
    lines += [f"    {line}" for line in filled_lines(short.filled)]
    if short.fixes:
        lines += ["  what helps, the cheapest first:", *(f"    - {line}" for line in short.fixes)]
    return lines


def filled_lines(filled: Filled) -> list[str]:
    """The largest groups of tensors, and the rest in one line."""
    rows = [tensor_row(group) for group in filled.tensors[:SHOWN]]
    others = filled.tensors[SHOWN:]
    lines = align(rows, right=(0, 1)) if rows else []
    if others:
        lines.append(f"and {sum(g.count for g in others)} smaller tensors, {size(sum(g.bytes for g in others))}")
    if filled.unseen:
        lines.append(f"and {size(filled.unseen)} that no tensor shows: libraries' workspaces, buffers in compiled code")
    return lines


def leak_lines(leaks: Sequence[Leak]) -> list[str]:
    """Each leak in one line; or that there is none."""
    if not leaks:
        return ["no leak: no step left tensors that later steps added to"]
    rows = [leak_row(leak) for leak in leaks[:SHOWN]]
    more = [f"and {len(leaks) - SHOWN} more of them"] if len(leaks) > SHOWN else []
    return ["leaks, tensors that each step leaves:", *align([LEAK_HEAD, *rows], right=(0, 1, 2)), *more]


MODULE_HEAD = ("module", "class", "saved for backward", "peak in forward")
LEAK_HEAD = ("bytes", "a step", "tensors", "type", "why it stays", "made in", "line")
TENSOR_HEAD = ("bytes", "tensors", "type", "what", "module", "line")


def step_head(steps: Sequence[StepMemory]) -> tuple[str, ...]:
    """The heads of the steps' cells."""
    reserved = ("reserved", "lost") if steps[0].reserved is not None else ()
    return ("step", "held before", "peak", "held after", *reserved, "time")


def step_row(step: StepMemory) -> tuple[str, ...]:
    """A step's cells."""
    sizes = (step.held_before, step.peak, step.held_after, step.reserved, step.lost)
    return (str(step.number), *(size(one) for one in sizes if one is not None), format_seconds(step.seconds))


def module_row(module: ModuleMemory) -> tuple[str, ...]:
    """A module's cells."""
    return (module.name, module.kind, size(module.held), size(module.peak))


def tensor_row(group: TensorGroup) -> tuple[str, ...]:
    """A group's cells."""
    what = f"{group.phase} {group.operator}".strip()
    return (size(group.bytes), f"x{group.count}", kind(group), what, group.module, near(group.line))


def leak_row(leak: Leak) -> tuple[str, ...]:
    """A leak's cells."""
    group = leak.tensors
    why = "a graph holds it: detach what is kept" if leak.in_graph else "it is kept"
    made = group.module or group.phase
    return (size(group.bytes), size(leak.bytes_per_step), f"x{group.count}", kind(group), why, made, near(group.line))


def near(line: str) -> str:
    """A line with its file as seen from the working folder, where it lies there."""
    return line.removeprefix(os.getcwd() + os.sep)


def kind(group: TensorGroup) -> str:
    """`float32[8, 16]`."""
    return f"{group.dtype}{list(group.shape)}"


def size(nbytes: int) -> str:
    """Bytes in words."""
    return format_bytes(nbytes, short=True)


def largest(modules: Sequence[ModuleMemory], count: int) -> list[ModuleMemory]:
    """Those that leave most held, then those that take most."""
    return sorted(modules, key=lambda module: (-module.held, -module.peak))[:count]


def some(steps: Sequence[StepMemory], most: int = 12) -> list[StepMemory]:
    """All of a few steps; of many the first, the last and the highest ones, in order."""
    if len(steps) <= most:
        return list(steps)
    ends = [*steps[:4], *steps[-4:]]
    high = sorted((step for step in steps[4:-4]), key=lambda step: -step.peak)[: most - len(ends)]
    return sorted((*ends, *high), key=lambda step: step.number)
