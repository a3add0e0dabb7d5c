"""memopt convert --to tensorflow: any source that becomes a program becomes a verified SavedModel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.cli.group import DIFFERENT, USAGE, CommandError
from memopt.cli.loading import Request, is_keras, is_saved_model, load
from memopt.tensorflow.process import InputsError, TensorFlowError

if TYPE_CHECKING:
    from memopt.tensorflow.record import TensorFlowExport


def to_tensorflow(
    request: Request, output: Path | None, inputs: Sequence[str], dynamic: str | None, *, overwrite: bool
) -> TensorFlowExport:
    """Load the source, write it as a SavedModel, and return the record.

    Args:
        request: the source.
        output: the folder to write; None verifies only.
        inputs: as `--input` takes them.
        dynamic: "batch", or "none" for fixed shapes; None is "batch", where it can vary.
        overwrite: whether a SavedModel that exists is replaced.

    Raises:
        CommandError: in one line, what is wrong and what to do.
    """
    if dynamic not in (None, "batch", "none"):
        raise CommandError(f"--dynamic {dynamic}: a SavedModel's batch can vary, or none", USAGE)
    path = Path(request.spec)
    if path.suffix.lower() == ".onnx":
        raise CommandError(f"{path}: an ONNX file cannot become a SavedModel: give the model that it is of", USAGE)
    if is_saved_model(path):
        raise CommandError(f"{path} is a SavedModel already", USAGE)
    try:
        from memopt.cli.conversion_inputs import conversion_inputs
        from memopt.convert.errors import ConversionError, DifferenceError
        from memopt.convert.inputs import parse_inputs
        from memopt.tensorflow.export import export_source
        from memopt.tensorflow.source import Source
    except ImportError as error:
        raise CommandError(
            f"writing a SavedModel needs {error.name or error}: pip install memopt[tensorflow]"
        ) from error
    try:
        specs = parse_inputs(inputs)
        if is_keras(request.spec):
            request = dataclasses.replace(request, shapes={spec.name: spec.shape for spec in specs}, dynamic=True)
            specs = []
        loaded = load(request)
        if loaded.exported is None:
            source = Source.of_module(loaded.model, conversion_inputs(loaded, specs))
        elif specs:
            raise CommandError(f"{loaded.name} has inputs of its own: leave --input", USAGE)
        else:
            source = Source.of_exported(loaded.exported)
        return export_source(source, output, name=loaded.name, dynamic=dynamic != "none", overwrite=overwrite)
    except DifferenceError as error:
        raise CommandError(str(error), DIFFERENT) from error
    except InputsError as error:
        raise CommandError(str(error), USAGE) from error
    except (ConversionError, TensorFlowError, OSError) as error:
        raise CommandError(str(error)) from error
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
