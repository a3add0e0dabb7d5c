"""Records of a compilation as text, JSON and one self-contained HTML page."""

from memopt.report.files import load, render, write_whole
from memopt.report.record import Environment, ProgramReport, Report, TensorRow
from memopt.step.curve import CurvePoint

__all__ = ["CurvePoint", "Environment", "ProgramReport", "Report", "TensorRow", "load", "render", "write_whole"]
