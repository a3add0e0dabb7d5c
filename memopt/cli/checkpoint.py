"""State dicts as people keep them, nested and with prefixes, read safely and fitted to a module."""

from __future__ import annotations

import argparse
import logging
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memopt.cli.group import USAGE, CommandError

log = logging.getLogger(__name__)

# Where training scripts put the weights, in the order in which they are looked for; --key chooses others.
_NESTS = ("state_dict", "model_state_dict", "model", "net", "network", "module", "params", "weights")
# What training scripts keep beside the weights and what is no more than data: settings, a best score, a random state.
_NUMPY: dict[str, Any] = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.ones(1).__reduce__()[0]}
_HARMLESS: list[Any] = [
    argparse.Namespace,
    np.dtype,
    np.ndarray,
    *(type(np.dtype(kind)) for kind in "bBhHiIlLqQefd?"),
    *((made, f"numpy.{core}.multiarray.{name}") for name, made in _NUMPY.items() for core in ("core", "_core")),
]
# What wrappers put before every name: DistributedDataParallel, torch.compile, Lightning, and a model within a model.
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")
_SHOWN = 3


def read_checkpoint(path: Path, *, trust_pickle: bool = False, key: str | None = None) -> Any:
    """The state dict (names and tensors) in a file, or with `trust_pickle` the module that was pickled whole.

    Args:
        path: a `.safetensors` file, or one of torch.save.
        trust_pickle: whether code in the file may run.
        key: the place of the weights in a nested checkpoint, with dots between: `ema`, `state.model`.

    Raises:
        CommandError: the file is broken, holds code, or no weights at that place.
    """
    found = _safetensors(path) if path.suffix.lower() == ".safetensors" else _torch_save(path, trust_pickle)
    if isinstance(found, torch.nn.Module) and key is None:
        return found
    if not isinstance(found, Mapping):
        raise CommandError(f"{path} holds no state dict (names and tensors), but {type(found).__name__}")
    weights = _at(found, key, path) if key is not None else _unwrapped(found, path)
    return weights.state_dict() if isinstance(weights, torch.nn.Module) else dict(weights)


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CommandError("reading .safetensors needs: pip install memopt[hf]") from error
    try:
        return load_file(path)
    except Exception as error:
        raise CommandError(f"{path} is no safetensors file: {error}") from error


def _torch_save(path: Path, trust_pickle: bool) -> Any:
    refuse_compressed(path)
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(
                path, map_location="cpu", weights_only=not trust_pickle, mmap=True if zipfile.is_zipfile(path) else None
            )
    except pickle.UnpicklingError as error:
        if trust_pickle:
            raise CommandError(f"{path} is no file of torch.save: {error}") from error
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        holds = f" (it holds {named[1]})" if named else ""
        raise CommandError(
            f"{path} is not a plain state dict{holds}: reading it may run code; if you trust it, add --trust-pickle",
            USAGE,
        ) from error
    except Exception as error:
        raise CommandError(f"{path} is no file of torch.save: {error}") from error


def refuse_compressed(path: Path) -> None:
    """Refuse archives that torch never writes: with compressed records a small file could fill the memory.

    Raises:
        CommandError: the archive is broken or compressed.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CommandError(f"{path} is a broken archive: {error}") from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CommandError(f"{path} holds compressed records, which torch.save never writes: it is refused")
    if sum(record.file_size for record in records) > path.stat().st_size:
        raise CommandError(f"{path} says that it holds more than the file does: it is refused")


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())
    )


def _unwrapped(found: Mapping[Any, Any], path: Path) -> Any:
    """The state dict itself, or the one at the usual places."""
    while not _is_state(found):
        place = next((name for name in _NESTS if isinstance(found.get(name), Mapping | torch.nn.Module)), None)
        if place is None:
            choices = _state_places(found)
            hint = f": choose with --key {' or '.join(choices[:_SHOWN])}" if choices else ""
            raise CommandError(f"{path} holds no state dict (names and tensors){hint}", USAGE if choices else 1)
        others = [name for name in _state_places(found) if name != place]
        if others:
            log.info("%s: taking %s; --key would choose %s", path, place, ", ".join(others))
        found = found[place]
    return found


def _state_places(found: Mapping[Any, Any]) -> list[str]:
    return [str(name) for name, value in found.items() if _is_state(value)]


def _at(found: Mapping[Any, Any], key: str, path: Path) -> Any:
    value: Any = found
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise CommandError(f"{path} has nothing at {key}: there is {names}", USAGE)
        value = value[part]
    if not _is_state(value):
        raise CommandError(f"{path} holds no state dict (names and tensors) at {key}", USAGE)
    return value


def fit(model: torch.nn.Module, state: Mapping[str, torch.Tensor], path: Path, factory: str) -> None:
    """Put the weights into the module. Prefixes that wrappers add are taken off where the names fit only without them.

    Raises:
        CommandError: names are missing or too many, or shapes or kinds of numbers differ; the message names them.
    """
    wanted = model.state_dict()
    state = _without_prefix(state, wanted)
    loaded = {tensor.data_ptr() for name, tensor in wanted.items() if name in state and tensor.numel()}
    # A tied weight is often saved once only.
    missing = [n for n, tensor in wanted.items() if n not in state and tensor.data_ptr() not in loaded]
    unexpected = [name for name in state if name not in wanted]
    both = [(name, state[name], wanted[name]) for name in state if name in wanted]
    differing = [
        f"{name} is {_kind(found)} there, {_kind(own)} in the module"
        for name, found, own in both
        if found.shape != own.shape or _family(found) != _family(own)
    ]
    parts = [
        f"{len(names)} {what} ({_listed(names)})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"), (differing, "of another shape or type"))
        if names
    ]
    if parts:
        for name in (*missing, *unexpected, *differing):
            log.info("%s: %s", path, name)
        raise CommandError(f"{path} does not fit {factory}: {'; '.join(parts)}")
    storages = [tensor.untyped_storage().data_ptr() for tensor in wanted.values() if tensor.numel()]
    tied = len(set(storages)) < len(storages)
    # Tensors that are taken as they are need no second copy; but tied ones would then no longer be one.
    cast = state if tied else {name: tensor.to(wanted[name].dtype) for name, tensor in state.items()}
    del wanted
    model.load_state_dict(cast, strict=False, assign=not tied)


def _without_prefix(state: Mapping[str, torch.Tensor], wanted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state)
    while not any(name in wanted for name in found):
        prefix = next((item for item in _PREFIXES if found and all(name.startswith(item) for name in found)), None)
        if prefix is None:
            break
        found = {name[len(prefix) :]: value for name, value in found.items()}
    # A wrapper within: `module.` stands before some names only where others belong to the loss.
    return found if any(name in wanted for name in found) else dict(state)


def _family(tensor: torch.Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else "whole"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{'x'.join(map(str, tensor.shape))}]"


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more; -v lists them" if rest > 0 else "")
