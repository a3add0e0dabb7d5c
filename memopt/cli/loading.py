"""From what the user typed as MODEL to a module and example inputs; each failure is one line."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from memopt import models
from memopt.cli import hugging_face
from memopt.cli.checkpoint import fit, read_checkpoint
from memopt.cli.exported import load_exported
from memopt.cli.group import FAILED, USAGE, CommandError
from memopt.tensorflow import keras_file
from memopt.tensorflow.process import InputsError, TensorFlowError, UnsafeModelError
from memopt.torch_compat import pytree

Inputs = tuple[Any, ...] | Mapping[str, Any]
_STATE_DICTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run: `model(*inputs)` or, when inputs is a mapping, `model(**inputs)` runs it.

    The inputs are empty where the source gives none and none were asked for. `exported` is there for a `.pt2` and for a
    Keras file; `labels` are names of axes, by input, and `notes` say what could not be had, one line each.
    """

    name: str
    model: torch.nn.Module
    inputs: Inputs
    exported: ExportedProgram | None = None
    labels: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked to load.

    Attributes:
        spec: a name of memopt.models, `package.module:factory`, a Hugging Face folder, a `.pt2`, a Keras file or a
            state dict.
        batch: how many examples in the inputs.
        tiny: the tiny size of a model of memopt.models.
        training: inputs with labels, so that the model returns its loss, and the model in train mode.
        factory: `package.module:factory`, or a name of memopt.models, that makes the module a state dict is for.
        task: the head of a Hugging Face model, where another than its config's is wanted.
        key: where in a nested checkpoint the weights are (`ema`).
        trust_pickle: whether files that run code when they are read may be read.
        device: where model and inputs are moved to; None leaves them where they are made.
        needs_inputs: whether a source without example inputs is refused.
        shapes: of inputs, by name, where a Keras file leaves them open.
        dynamic: whether axes that a Keras file leaves open vary in its program.
    """

    spec: str
    batch: int = 2
    tiny: bool = False
    training: bool = True
    factory: str | None = None
    key: str | None = None
    task: str | None = None
    trust_pickle: bool = False
    device: str | None = None
    needs_inputs: bool = True
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    dynamic: bool = False


def load(request: Request) -> Loaded:
    """Load the model.

    Raises:
        CommandError: in one line, what is wrong and what to do.
    """
    device = None if request.device is None else _device(request.device)
    path = Path(request.spec)
    suffix = path.suffix.lower()
    if request.factory is not None and suffix not in _STATE_DICTS:
        raise CommandError("--model goes with a .safetensors or .pt state dict", USAGE)
    if request.key is not None and suffix not in _STATE_DICTS:
        raise CommandError("--key goes with a .safetensors or .pt state dict", USAGE)
    if request.task is not None and not path.is_dir():
        raise CommandError("--task goes with a Hugging Face folder", USAGE)
    if request.spec.partition(":")[0] in models.names():
        if (path / "config.json").is_file():
            raise CommandError(
                f"{path} is a folder here and a model of memopt.models: write ./{path} for the folder, or call from "
                "another folder for the model",
                USAGE,
            )
        found = _built_in(request)
    elif is_saved_model(path):
        raise CommandError(
            f"{path} is a SavedModel, which memopt convert and memopt inspect read: for other verbs convert it first",
            USAGE,
        )
    elif path.is_dir():
        found = Loaded(path.name, *_hugging_face(path, request))
    elif suffix in keras_file.SUFFIXES:
        found = _keras(path, request)
    elif suffix == ".pt2" or suffix in _STATE_DICTS:
        if not path.is_file():
            raise CommandError(f"no file {path}", USAGE)
        found = _exported(path, request) if suffix == ".pt2" else _from_state_dict(path, request)
    elif ":" in request.spec:
        found = _from_factory(request.spec, request)
    elif suffix == ".json" and path.is_file():
        raise CommandError(f"{path} is no model: give the folder that it is in, {path.parent}", USAGE)
    else:
        close = difflib.get_close_matches(request.spec, models.names(), n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise CommandError(
            f"no model {request.spec!r}{hint}: give package.module:factory, a folder, a .pt2, or one of "
            + ", ".join(models.names()),
            USAGE,
        )
    if found.exported is None:
        found.model.train(request.training)
    return found if device is None else _moved(found, device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"unknown device {name!r}: use cpu, cuda or cuda:N", USAGE) from error
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"device {name!r} is not supported: use cpu, cuda or cuda:N", USAGE)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(f"no device {name!r} on this machine: {torch.cuda.device_count()} CUDA devices", USAGE)
    return device


def _moved(found: Loaded, device: torch.device) -> Loaded:
    inputs: Inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), found.inputs)
    return dataclasses.replace(found, model=found.model.to(device), inputs=inputs)


def _built_in(request: Request) -> Loaded:
    try:
        model = models.build(request.spec, tiny=request.tiny)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    return Loaded(request.spec, model, model.example_inputs(request.batch, labels=request.training))


def _hugging_face(path: Path, request: Request) -> tuple[torch.nn.Module, Inputs]:
    if not request.needs_inputs:
        return hugging_face.load_model(path, request.trust_pickle, request.task, strict=True), {}
    return hugging_face.load(path, request.batch, request.training, request.trust_pickle)


def import_attribute(spec: str, what: str, *, option: str = "") -> Any:
    """Import what `package.module:attribute` names, with the working folder on the path.

    Args:
        spec: what the user typed.
        what: what stands for the attribute in the message about a spec that is none.
        option: what stands before every message.

    Returns:
        The attribute; None where the module has none of that name.

    Raises:
        CommandError: the spec is none, or the module cannot be imported.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"{option}{spec!r} is no package.module:{what}", USAGE)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise CommandError(f"{option}cannot import {module_name}: {error}", USAGE) from error


def _call_factory(spec: str) -> Any:
    factory = import_attribute(spec, "factory")
    if not callable(factory):
        module_name, _, attribute = spec.partition(":")
        raise CommandError(f"{module_name} has no callable {attribute}", USAGE)
    try:
        return factory()
    except Exception as error:
        raise CommandError(f"{spec} raised {type(error).__name__}: {error}") from error


def _from_factory(spec: str, request: Request) -> Loaded:
    made = _call_factory(spec)
    if isinstance(made, torch.nn.Module):
        return Loaded(spec, made, _example_inputs(made, spec, request))
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        model, inputs = made
        return Loaded(spec, model, inputs if isinstance(inputs, tuple | Mapping) else (inputs,))
    raise CommandError(f"{spec} returned {type(made).__name__}: it must return (model, inputs) or a model", USAGE)


def _example_inputs(model: torch.nn.Module, spec: str, request: Request) -> Inputs:
    method = getattr(model, "example_inputs", None)
    if not callable(method):
        if not request.needs_inputs:
            return {}
        raise CommandError(
            f"{spec} returned a model without example_inputs(batch, labels=…): return (model, inputs) instead", USAGE
        )
    inputs: Inputs = method(request.batch, labels=request.training)
    return inputs


def _exported(path: Path, request: Request) -> Loaded:
    program = load_exported(path, trust_pickle=request.trust_pickle)
    if program.example_inputs is None:
        raise CommandError(f"{path} was saved without example inputs: export it again", USAGE)
    args, kwargs = program.example_inputs
    if args and kwargs:
        raise CommandError(f"{path} takes both positional and keyword arguments: export it with one kind", USAGE)
    return Loaded(path.name, program.module(), dict(kwargs) if kwargs else tuple(args), program)


def is_saved_model(path: Path) -> bool:
    """Whether the folder is one that TensorFlow saved a model in."""
    return (path / "saved_model.pb").is_file()


def is_keras(spec: str) -> bool:
    """Whether the name is that of a Keras file."""
    return spec.lower().endswith(keras_file.SUFFIXES)


def _keras(path: Path, request: Request) -> Loaded:
    try:
        found = keras_file.load_keras(path, batch=request.batch, inputs=request.shapes, dynamic=request.dynamic)
    except FileNotFoundError as error:
        raise CommandError(str(error), USAGE) from error
    except TensorFlowError as error:
        usage = isinstance(error, UnsafeModelError | InputsError)
        raise CommandError(str(error), USAGE if usage else FAILED) from error
    exported = found.exported
    if request.device is not None and request.device != "cpu":
        exported = move_to_device_pass(exported, request.device)
    inputs = exported.example_inputs[1] if exported.example_inputs else {}
    labels = {name: {0: "batch"} for name in inputs}
    return Loaded(path.name, exported.module(), dict(inputs), exported, labels, found.notes)


def _from_state_dict(path: Path, request: Request) -> Loaded:
    state = read_checkpoint(path, trust_pickle=request.trust_pickle, key=request.key)
    if isinstance(state, torch.nn.Module):
        return Loaded(path.name, state, _example_inputs(state, str(path), request))
    if request.factory is None:
        folder = f", or give its folder, {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise CommandError(
            f"{path} holds weights only: say which module they are for, --model package.module:factory{folder}", USAGE
        )
    if request.factory.partition(":")[0] in models.names():
        found = _built_in(dataclasses.replace(request, spec=request.factory))
    else:
        found = _from_factory(request.factory, request)
    fit(found.model, state, path, request.factory)
    return dataclasses.replace(found, name=path.name)
