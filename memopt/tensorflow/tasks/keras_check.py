"""Whether a Keras file may be read: Keras itself is not imported before that is known.

A Keras file names the classes that it is made of. Only Keras's own layers and functions are let in, none that holds
code (Lambda) or loads other files.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

# Layers that run code in the file, or load another file that may.
_CODE = ("Lambda", "__lambda__", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer")
# The parts of keras that a model is made of; others (utils, saving, …) are no business of a file.
_PARTS = (
    "layers", "models", "activations", "initializers", "regularizers", "constraints", "ops", "random", "dtype_policies",
    "quantizers", "applications",
)  # fmt: skip
# How training was set up is not read.
_SKIPPED = ("compile_config", "training_config")
_LARGEST_CONFIG = 64 * 2**20


class Unsafe(ValueError):
    """The file asks for code to run."""

    kind = "unsafe"


def run(request: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Raise where the file at `path` may not be read: ValueError where it is broken, Unsafe where it holds code."""
    path = Path(request["path"])
    _refuse_code(_configuration(path), path)
    return {}


def _configuration(path: Path) -> Any:
    """The description of the model's layers, as JSON.

    Raises:
        ValueError: the file is broken, or no Keras model.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo("config.json").file_size > _LARGEST_CONFIG:
                    raise ValueError("config.json is too large")
                return json.loads(archive.read("config.json"))
        with h5py.File(path, "r") as file:
            text = file.attrs.get("model_config")
            if text is None:
                raise ValueError("it holds weights only: save the whole model")
            return json.loads(text)
    except (OSError, KeyError, ValueError, TypeError, RecursionError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no Keras model: {_first_line(error)}") from error


def _refuse_code(configuration: Any, path: Path) -> None:
    for entry in _objects(configuration):
        kind, module, name = entry.get("class_name"), entry.get("module"), entry.get("registered_name")
        if kind in _CODE:
            raise Unsafe(f"{path} holds a {kind} layer, which is code: memopt runs no code of a Keras file")
        known = module is None or (module == "builtins" and kind == "function") or _is_keras(str(module))
        if not known or (isinstance(name, str) and ">" in name):
            what = name if isinstance(name, str) else f"{module}.{kind}"
            raise Unsafe(f"{path} holds {what}, which is no part of Keras: give package.module:factory instead")


def _is_keras(module: str) -> bool:
    words = [word for word in module.split(".") if word != "src"]
    return words[0] == "keras" and (len(words) == 1 or words[1] in _PARTS)


def _objects(configuration: Any) -> Iterator[dict[str, Any]]:
    work = [configuration]
    while work:
        item = work.pop()
        if isinstance(item, dict):
            if "class_name" in item:
                yield item
            work.extend(value for key, value in item.items() if key not in _SKIPPED)
        elif isinstance(item, list):
            work.extend(item)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0]
