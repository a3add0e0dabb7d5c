"""A model as a SavedModel of TensorFlow: compiled by XLA, verified beside PyTorch, and served without it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memopt.convert.emit import output_names
from memopt.convert.errors import ConversionError
from memopt.convert.reference import run_wide
from memopt.convert.verify import Run, compare_all
from memopt.convert.write import remove_leftovers, signals_raise
from memopt.errors import first_line
from memopt.passes import INFERENCE
from memopt.passes.fold_constants import FoldConstants
from memopt.tensorflow import exchange
from memopt.tensorflow.process import call, require
from memopt.tensorflow.record import Entry, TensorFlowExport
from memopt.tensorflow.source import Source, SourceError
from memopt.xla.artifact import Artifact, to_artifact
from memopt.xla.table import LowerError

SIGNATURE = "serving_default"


def export_source(
    source: Source,
    path: Path | None,
    *,
    name: str,
    dynamic: bool = True,
    overwrite: bool = False,
) -> TensorFlowExport:
    """Write a SavedModel; see `memopt.export_tensorflow`.

    Args:
        source: the model and its inputs.
        path: the folder to write; None verifies only.
        name: what the record calls the model.
        dynamic: whether the batch varies, where it can.
        overwrite: whether an existing folder is replaced.

    Raises:
        ConversionError: the model cannot be captured, lowered, written or run.
        DifferenceError: the SavedModel computes other numbers than the model.
        TensorFlowError: TensorFlow is missing, or fails.
        FileExistsError, OSError: the folder cannot be written.
    """
    require("tensorflow", purpose="writing a SavedModel")
    if path is not None:
        _refuse_to_replace(path, overwrite)
    seconds: dict[str, float] = {}
    parent = Path(tempfile.gettempdir()) if path is None else path.parent
    if path is not None:
        remove_leftovers(path)
    stage = Path(tempfile.mkdtemp(prefix=f".{'memopt' if path is None else path.name}.{os.getpid()}.", dir=parent))
    try:
        with signals_raise():
            with _timed(seconds, "capture"):
                names = _output_names(source)
                artifact, notes = _artifact(source, dynamic=dynamic)
                dtypes = {key: str(value.dtype).removeprefix("torch.") for key, value in source.inputs.items()}
            with _timed(seconds, "write"):
                inputs, outputs = _save(artifact, dtypes, names, stage)
            with _timed(seconds, "verify"):
                varies = any(size is None for entry in inputs for size in entry.shape)
                sizes = (source.batch, *source.tried_sizes()) if varies else (source.batch,)
                runs, first, memory = _verify(source, sizes, names, stage)
            record = TensorFlowExport(
                source=name,
                output=None if path is None else str(path),
                signature=SIGNATURE,
                inputs=inputs,
                outputs=outputs,
                bytes=sum(file.stat().st_size for file in (stage / "saved_model").rglob("*") if file.is_file()),
                memory=memory,
                compile_seconds=first,
                runs=runs,
                notes=notes,
                seconds=seconds,
            )
            if path is not None:
                _commit(stage / "saved_model", path, stage)
            return record
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _refuse_to_replace(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another name or set overwrite")
    if path.exists() and not (path / "saved_model.pb").is_file() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is no SavedModel: it is not replaced")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist")


def _output_names(source: Source) -> tuple[str, ...]:
    try:
        with torch.no_grad(), source.plain():
            return output_names(source.function(**source.inputs))
    except ConversionError:
        raise
    except Exception as error:
        raise ConversionError(f"the model cannot be run: {first_line(error)}") from error


def _artifact(source: Source, *, dynamic: bool) -> tuple[Artifact, tuple[str, ...]]:
    """The lowered model, with a batch that varies where that can be had, else with a note of why not."""
    notes: tuple[str, ...] = ()
    sizes = source.captured_sizes() if dynamic else ()
    if sizes:
        # A constant that is folded at one size cannot vary; XLA folds them itself, when the size is known.
        open_passes = [item for item in INFERENCE if not isinstance(item, FoldConstants)]
        try:
            first, *others = (source.program(source.inputs_at(size), open_passes) for size in sizes)
            return _plain(to_artifact(first, others)), ()
        except (LowerError, RuntimeError, SourceError) as error:
            notes = (f"all shapes are fixed: {first_line(error)}",)
    try:
        return _plain(to_artifact(source.program(source.inputs, INFERENCE))), notes
    except (LowerError, RuntimeError, SourceError) as error:
        raise ConversionError(first_line(error)) from error


def _plain(artifact: Artifact) -> Artifact:
    if artifact.random:
        raise LowerError("the model draws random numbers when it runs: put it into eval mode")
    return artifact


def _save(
    artifact: Artifact, given: Mapping[str, str], names: Sequence[str], stage: Path
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Write `stage/saved_model`; inputs and outputs of its signature. `given`: the inputs' types, by name."""
    exported = artifact.exported
    variables: dict[str, torch.Tensor] = {}
    inputs, arguments = [], []
    kept = set(artifact.kept)
    called = _called([entry.name for entry in artifact.inputs if entry.name not in artifact.state], list(given))
    same: dict[tuple[Any, ...], str] = {}
    for position, (entry, shape) in enumerate(zip(artifact.inputs, exported.in_avals, strict=True)):
        # JAX narrows 64-bit tensors that no operator reads.
        dtype = str(shape.dtype)
        if entry.name not in artifact.state:
            key = called[entry.name]
            inputs.append(dataclasses.replace(_entry(key, shape), dtype=given[key]))
            argument = ("input", key, dtype)
        else:
            tensor = artifact.state[entry.name]
            storage = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            # Tied weights are stored once.
            owner = same.setdefault(storage, entry.name) if tensor.numel() else entry.name
            if position in kept:
                variables[owner] = artifact.state[owner]
            argument = ("variable", owner, dtype)
        if position in kept:
            arguments.append(argument)
    outputs = tuple(_entry(name, shape) for name, shape in zip(names, exported.out_avals, strict=True))
    exchange.write(stage, "variables", variables)
    (stage / "module.bin").write_bytes(exported.mlir_module_serialized)
    request = {
        "version": exported.calling_convention_version,
        "platforms": [platform.upper() for platform in exported.platforms],
        "arguments": arguments,
        "inputs": [dataclasses.asdict(entry) for entry in inputs],
        "outputs": [dataclasses.asdict(entry) for entry in outputs],
    }
    call("tensorflow_save", request, stage)
    return tuple(inputs), outputs


def _called(found: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The inputs' own names: torch.fx renames those that are called like a Python builtin ("input")."""
    rest = iter([name for name in names if name not in found])
    return {name: name if name in names else next(rest) for name in found}


def _entry(name: str, value: Any) -> Entry:
    return Entry(name, str(value.dtype), tuple(size if isinstance(size, int) else None for size in value.shape))


def _verify(
    source: Source, sizes: Sequence[int | None], names: Sequence[str], stage: Path
) -> tuple[tuple[Run, ...], float, Mapping[str, int]]:
    """Run the SavedModel in a process with TensorFlow alone, at several batch sizes, and compare with the model."""
    sets: list[tuple[int | None, list[torch.Tensor], list[torch.Tensor] | None]] = []
    for number, size in enumerate(sizes):
        inputs = dict(source.inputs) if number == 0 or size is None else source.inputs_at(size, seed=number)
        try:
            expected = source.run(inputs)
        except Exception as error:
            if number == 0:
                raise ConversionError(f"the model cannot be run: {first_line(error)}") from error
            continue  # what the model itself does not take, nobody can compare
        exchange.write(stage, f"inputs_{len(sets)}", inputs)
        with source.plain():
            sets.append((size, expected, run_wide(source.function, inputs)))
    request = {"path": str(stage / "saved_model"), "signature": SIGNATURE, "sets": len(sets)}
    answer = call("tensorflow_run", request, stage)
    runs = []
    for number, (size, expected, wide) in enumerate(sets):
        found = exchange.read(stage, f"outputs_{number}")
        where = "" if size is None else f" at batch {size}"
        if set(found) != set(names):
            raise ConversionError(f"the SavedModel returns {', '.join(found)}, not {', '.join(names)}")
        results = [found[name] for name in names]
        on_cpu = [value.cpu() for value in expected]
        reference = None if wide is None else [value.cpu() for value in wide]
        sized = {} if size is None else {"batch": size}
        runs.append(Run(sized, compare_all(names, results, on_cpu, reference, where)))
    return tuple(runs), answer["first"][0], answer["memory"]


def _commit(made: Path, path: Path, stage: Path) -> None:
    """Put the folder under its name; an old one is away only when the new one is there."""
    old = stage / "replaced"
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(made, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started
