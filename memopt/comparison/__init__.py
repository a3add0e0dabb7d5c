"""One model on every engine, side by side, each in a process of its own: time, memory, error against float64."""

from memopt.comparison.record import Comparison, Row
from memopt.comparison.run import compare

__all__ = ["Comparison", "Row", "compare"]
