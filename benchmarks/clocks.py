"""A GPU's clock and power while steps are timed: at its power limit the same kernels take longer.

A device that computes without a pause reaches that limit sooner than one that waits for its host now and then, and then
lowers its clock: times of steps are compared once it has settled.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

_FIELDS = ("timestamp", "clocks.sm", "power.draw", "clocks_event_reasons.active")
_EVERY_MS = 50
_POWER_LIMIT = 0x4  # the reason's bit: the driver's software keeps the power below its limit


def settled(step: Callable[[], None], seconds: float) -> None:
    """Take steps for so many seconds, and one at least."""
    until = time.monotonic() + seconds
    step()
    while time.monotonic() < until:
        step()


class Clocks:
    """Within, the clock of one GPU is watched by NVIDIA's tool, a process of its own."""

    def __init__(self, uuid: str) -> None:
        """Name the GPU as `torch.cuda.get_device_properties` does."""
        self._uuid = uuid
        self._output: IO[str] | None = None
        self._tool: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Clocks:
        self._output = tempfile.TemporaryFile("w+")
        query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
        try:
            self._tool = subprocess.Popen(["nvidia-smi", f"--id=GPU-{self._uuid}", *query], stdout=self._output)
        except OSError:
            self._tool = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tool is not None:
            self._tool.terminate()
            self._tool.wait()
        assert self._output is not None
        self._output.close()

    def since(self, began: datetime.datetime) -> dict[str, Any]:
        """What was seen since then, local time; empty where nothing was.

        Returns:
            `clock_hz` and `power_watts`: medians. `power_limited`: the share of looks at which power was at its limit.
        """
        assert self._output is not None
        self._output.seek(0)
        return seen(self._output.read(), began)


def seen(text: str, began: datetime.datetime) -> dict[str, Any]:
    """What lines of NVIDIA's tool say of the time since then; see `Clocks.since`."""
    looks = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            when = datetime.datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f")
            look = float(cells[1]), float(cells[2]), int(cells[3], 16)
        except (ValueError, IndexError):  # the last line may be cut, and a device may not tell
            continue
        if when >= began:
            looks.append(look)
    if not looks:
        return {}
    clocks, watts, reasons = zip(*looks, strict=True)
    limited = sum(bool(reason & _POWER_LIMIT) for reason in reasons) / len(looks)
    return {
        "clock_hz": 1e6 * statistics.median(clocks),
        "power_watts": statistics.median(watts),
        "power_limited": limited,
    }
