"""memopt: say how much memory you have; memopt makes your model fit, with the least slowdown, and proves it."""

from memopt import models
from memopt.api import compile, estimate, export, export_tensorflow, plan
from memopt.budget import BudgetError
from memopt.capture.export import CaptureError
from memopt.comparison import Comparison, compare
from memopt.memory.breakdown import MemoryBreakdown
from memopt.memory.measure import Measurement, measure
from memopt.module import CompiledModule
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
    "plan",
]
