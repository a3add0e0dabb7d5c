"""ONNX files that a verb reads, prepared as passes take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopt.cli.group import USAGE, CommandError


def load_onnx(path: Path) -> Any:
    """The file's model (`onnx_ir.Model`).

    Raises:
        CommandError: the file is missing or no ONNX model, or the packages are.
    """
    if not path.is_file():
        raise CommandError(f"no file {path}", USAGE)
    try:
        import onnx_ir as ir

        from memopt.onnx import OnnxModelError, prepare
    except ImportError as error:
        raise CommandError(f"ONNX files need {error.name or error}: pip install memopt[onnx]") from error
    try:
        return prepare(ir.load(path))
    except OnnxModelError as error:
        raise CommandError(f"{path}: {error}") from error
    except Exception as error:  # the reader raises whatever comes up
        raise CommandError(f"{path} is no ONNX file: {error}") from error
