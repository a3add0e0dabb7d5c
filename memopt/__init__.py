"""memopt: say how much memory you have; memopt makes your model fit, with the least slowdown, and proves it.

Names are imported when they are first used, so that neither `import memopt` nor `memopt --help` waits for torch.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopt import models
    from memopt.api import compile, estimate, plan
    from memopt.budget import BudgetError
    from memopt.capture.export import CaptureError
    from memopt.comparison import Comparison, compare
    from memopt.memory.breakdown import MemoryBreakdown
    from memopt.memory.measure import Measurement, measure
    from memopt.model_files import export, export_tensorflow
    from memopt.module import CompiledModule
    from memopt.monitoring.monitor import Monitor, monitor
    from memopt.pass_manager import Change, Pass, PassError, PassManager, PassResult, Refusal
    from memopt.passes import INFERENCE, TRAINING
    from memopt.program import Program
    from memopt.report.record import Report

__version__ = "0.1.0"

__all__ = [
    "INFERENCE",
    "TRAINING",
    "BudgetError",
    "CaptureError",
    "Change",
    "Comparison",
    "CompiledModule",
    "Measurement",
    "MemoryBreakdown",
    "Monitor",
    "Pass",
    "PassError",
    "PassManager",
    "PassResult",
    "Program",
    "Refusal",
    "Report",
    "compare",
    "compile",
    "estimate",
    "export",
    "export_tensorflow",
    "measure",
    "models",
    "monitor",
    "plan",
]

# Where each name is defined.
_HOMES = {
    "memopt.api": ("compile", "estimate", "plan"),
    "memopt.model_files": ("export", "export_tensorflow"),
    "memopt.budget": ("BudgetError",),
    "memopt.capture.export": ("CaptureError",),
    "memopt.comparison": ("Comparison", "compare"),
    "memopt.memory.breakdown": ("MemoryBreakdown",),
    "memopt.memory.measure": ("Measurement", "measure"),
    "memopt.module": ("CompiledModule",),
    "memopt.monitoring.monitor": ("Monitor", "monitor"),
    "memopt.pass_manager": ("Change", "Pass", "PassError", "PassManager", "PassResult", "Refusal"),
    "memopt.passes": ("INFERENCE", "TRAINING"),
    "memopt.program": ("Program",),
    "memopt.report.record": ("Report",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if "torch" in sys.modules:
    importlib.import_module("memopt.torch_compat.advised_settings")


def __getattr__(name: str) -> Any:
    """Import a public name, or a room such as `memopt.models`, when it is first asked for."""
    drawn = random.getstate()  # modules of others draw when they are imported
    try:
        return _imported(name)
    finally:
        random.setstate(drawn)


def _imported(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        try:
            value = importlib.import_module(f"memopt.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"memopt.{name}":
                raise
            raise AttributeError(f"module 'memopt' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
