"""The verbs that read a SavedModel of TensorFlow: convert and inspect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.cli.group import DIFFERENT, FAILED, USAGE, CommandError
from memopt.tensorflow.process import InputsError, TensorFlowError, UnsafeModelError

if TYPE_CHECKING:
    from memopt.convert.inputs import InputSpec
    from memopt.convert.options import Options
    from memopt.convert.record import Conversion


def convert_folder(
    path: Path, output: Path | None, specs: Sequence[InputSpec], dynamic: Any, options: Options
) -> Conversion:
    """Convert to ONNX.

    Raises:
        CommandError: in one line, what is wrong and what to do.
        ConversionError, DifferenceError, ValueError: see `memopt.tensorflow.saved_model.convert_saved_model`.
    """
    from memopt.tensorflow.saved_model import convert_saved_model

    if dynamic is not None:
        raise CommandError(f"{path} has shapes of its own: leave --dynamic", USAGE)
    if options.dtype or options.quantize:
        raise CommandError("--dtype and --quantize: convert the SavedModel to ONNX first, then that file", USAGE)
    with _in_one_line():
        return convert_saved_model(path, output, inputs={spec.name: spec.shape for spec in specs}, options=options)


def inspect_folder(path: Path, form: str, batch: int) -> str:
    """Compile with XLA; the report as text or JSON.

    Raises:
        CommandError: in one line, what is wrong and what to do.
    """
    if form == "html":
        raise CommandError("what is known of a SavedModel is text or json: leave --format html", USAGE)
    try:
        from memopt.convert.errors import DifferenceError
        from memopt.tensorflow.saved_model import inspect_saved_model
    except ImportError as error:
        needed = error.name or error
        raise CommandError(f"inspecting a SavedModel needs {needed}: pip install memopt[tensorflow]") from error
    try:
        with _in_one_line():
            report = inspect_saved_model(path, batch=batch)
    except DifferenceError as error:
        raise CommandError(str(error), DIFFERENT) from error
    return report.to_json() if form == "json" else report.to_text()


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except (InputsError, UnsafeModelError) as error:
        raise CommandError(str(error), USAGE) from error
    except TensorFlowError as error:
        raise CommandError(str(error), FAILED) from error
