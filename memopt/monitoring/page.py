"""What a monitor has seen as one self-contained page, in the pieces of a report's, and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from memopt.monitoring import text
from memopt.monitoring.record import OutOfMemory
from memopt.report.html_page import render_page
from memopt.report.tables import TableWriter
from memopt.report.view import View, card, table

if TYPE_CHECKING:
    from memopt.monitoring.monitor import Monitor

_MODULES, _TENSORS = 60, 40  # rows


def to_json(monitor: Monitor) -> str:
    """All of it."""
    return json.dumps(monitor.as_dict(), indent=1)


def to_html(monitor: Monitor) -> str:
    """The page."""
    return render_page(monitor_view(monitor), text.to_text(monitor), ("steps.js",))


def monitor_view(monitor: Monitor) -> View:
    """What the page shows."""
    short = monitor.out_of_memory
    view: View = {
        "title": "memory of a loop",
        "subtitle": text.summary(monitor),
        "cards": _cards(monitor),
        "notes": [] if short is None else _notes(short),
        "budget": None,
        "breakdown": _breakdown(monitor),
        "breakdown_title": f"Where the bytes {'of the highest peak go' if short is None else 'went as memory ran out'}",
        "curve": [],
        "steps": [
            [step.number, step.held_before, step.peak, step.held_after, step.reserved, step.seconds]
            for step in monitor.steps
        ],
        "programs": [],
        "tables": _tables(monitor),
        "about": "",
        "passes": [],
    }
    return {**view, **TableWriter().tables()}


def _notes(short: OutOfMemory) -> list[str]:
    where = f" in {short.module}" if short.module else ""
    place = f", at {short.line}" if short.line else ""
    return [f"Memory ran out in step {short.step}, {short.phase}{where}{place}: {short.message}", *short.fixes]


def _cards(monitor: Monitor) -> list[View]:
    steps, leaks, drift = monitor.steps, monitor.leaks, monitor.drift_bytes
    cards = [
        card("peak", text.size(monitor.peak_bytes), "of tensors, the highest step"),
        card("held after the last step", text.size(steps[-1].held_after) if steps else "no step"),
    ]
    lost = [step.lost for step in steps if step.lost is not None]
    reserved = [step.reserved for step in steps if step.reserved is not None]
    if reserved and lost:
        cards.append(card("reserved", text.size(max(reserved)), f"{text.size(max(lost))} beyond the peak"))
    grows = f"{'+' if drift >= 0 else '-'}{text.size(abs(drift))}"
    cards.append(card("drift a step", grows, "on average of the later half", "bad" if leaks and drift > 0 else ""))
    words = f"{text.size(sum(leak.tensors.bytes for leak in leaks))} so far" if leaks else "no kind of tensor grows"
    cards.append(card("leaks", str(len(leaks)) if leaks else "none", words, "bad" if leaks else "good"))
    if monitor.out_of_memory is not None:
        cards.append(card("out of memory", f"step {monitor.out_of_memory.step}", monitor.out_of_memory.phase, "bad"))
    return cards


def _breakdown(monitor: Monitor) -> list[list[object]]:
    """The highest peak by what its tensors are, the total last: at most seven parts, as a report has."""
    filled = monitor.filled if monitor.out_of_memory is None else monitor.out_of_memory.filled
    parts: dict[str, int] = {}
    for group in filled.tensors:
        name = {"parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "forward": "made in forward",
                "backward": "made in backward"}.get(group.phase, group.phase)  # fmt: skip
        name = name if name in _PARTS else "others"
        parts[name] = parts.get(name, 0) + group.bytes
    if filled.unseen:
        parts["others"] = parts.get("others", 0) + filled.unseen
    total = sum(parts.values())
    return [*([name, parts.get(name, 0)] for name in _PARTS), ["total", total]] if total else []


_PARTS = ("parameters", "buffers", "gradients", "optimizer state", "made in forward", "made in backward", "others")


def _tables(monitor: Monitor) -> list[View]:
    found = []
    if monitor.leaks:
        rows = [text.leak_row(leak) for leak in monitor.leaks[:_TENSORS]]
        found.append(table("Leaks", text.LEAK_HEAD, rows, (0, 1, 2), (6,)))
    if monitor.modules:
        rows = [text.module_row(module) for module in text.largest(monitor.modules, _MODULES)]
        found.append(table("Modules", text.MODULE_HEAD, rows, (2, 3)))
    short = monitor.out_of_memory
    filled, when = (monitor.filled, "at the highest peak") if short is None else (short.filled, "as memory ran out")
    if filled.tensors:
        rows = [text.tensor_row(group) for group in filled.tensors[:_TENSORS]]
        found.append(table(f"What filled the device {when}", text.TENSOR_HEAD, rows, (0, 1), (5,)))
    if monitor.steps:
        head, rows = text.step_head(monitor.steps), [text.step_row(step) for step in text.some(monitor.steps, 40)]
        found.append(table("Steps", head, rows, range(1, len(head))))
    return found
