"""What can go wrong on the way from a model to an ONNX file; each message is one line that says what to do."""

from __future__ import annotations


class ConversionError(RuntimeError):
    """The model cannot be converted."""


class DifferenceError(ConversionError):
    """The ONNX graph computes other numbers than the model: nothing is written."""
