"""Read a Keras 3 file, which `keras_check` has let pass, with torch as its backend; write it as a `.pt2`."""

from __future__ import annotations

import inspect
import keyword
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # read when keras is imported

import keras
import torch
from torch.export import Dim

# Sizes for axes that the model leaves open: tokens of a sentence, or the edge of a picture.
_SEQUENCE, _EDGE = 16, 64
_TOLERANCE = 1e-5


class Inputs(ValueError):
    """The inputs do not fit the model."""

    kind = "inputs"


class Named(torch.nn.Module):
    """A Keras model in inference, called with its inputs by name, and returning its outputs by name.

    Its `forward` takes any names: `named` gives it a signature, which torch.export needs for axes that vary.
    """

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run the model: tensors in, a dictionary of tensors out."""
        values = [inputs[name] for name in self.names]
        result = self.model(values[0] if len(values) == 1 else values, training=False)
        if isinstance(result, dict):
            return result
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        given = list(getattr(self.model, "output_names", None) or ())
        if len(set(given)) != len(results):
            given = [f"output_{number}" for number in range(len(results))]
        return {_identifier(name): value for name, value in zip(given, results, strict=True)}


def named(model: Any, names: Sequence[str]) -> Named:
    """The model with a forward of these keyword arguments."""

    def forward(self: Named, **inputs: torch.Tensor) -> Any:
        return Named.forward(self, **inputs)

    kinds = [("self", inspect.Parameter.POSITIONAL_ONLY)] + [(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature([inspect.Parameter(*kind) for kind in kinds])  # type: ignore[attr-defined]
    made: Named = type("NamedModel", (Named,), {"forward": forward})(model, names).eval()
    return made


def run(request: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Write `model.pt2`: its weights, the graph in inference, and example inputs by name.

    The request: `path`; `batch`, the examples in the inputs; `inputs`, shapes by name where the model's own do not do;
    `dynamic`, whether axes without a size vary in the graph.

    Raises:
        ValueError: Keras cannot read the file, or torch.export not capture the model.
        Inputs: the inputs do not fit, or the model cannot be run on them.
    """
    path = Path(request["path"])
    try:
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        raise ValueError(f"Keras cannot read {path}: {_first_line(error)}") from error
    specs = _specs(model, request["inputs"])
    wrapper = named(model, [name for name, _, _ in specs])
    inputs, varying = {}, {}
    for name, shape, dtype in specs:
        sizes = request["inputs"].get(name) or _example_shape(shape, request["batch"])
        inputs[name] = _example(sizes, dtype)
        varying[name] = {axis: Dim.AUTO for axis, size in enumerate(shape) if size is None and sizes[axis] > 1}
    with torch.no_grad():
        try:
            expected = wrapper(**inputs)
        except Exception as error:
            raise Inputs(f"{path} cannot be run on {_shapes(inputs)}: {_first_line(error)}") from error
        exported, notes = _exported(wrapper, inputs, varying if request["dynamic"] else {}, path)
        _compare(exported.module()(**inputs), expected, path)
    torch.export.save(exported, folder.path / "model.pt2")
    return {"notes": notes}


def _specs(model: Any, given: dict[str, list[int]]) -> list[tuple[str, tuple[int | None, ...], str]]:
    """Name, sizes (None where open) and type of each input, in the order of the call."""
    tensors = getattr(model, "inputs", None)
    if not tensors:
        raise Inputs(f"the {type(model).__name__} says nothing about its inputs: save it with an Input layer")
    specs = [(_identifier(tensor.name), tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    names = [name for name, _, _ in specs]
    if len(set(names)) != len(names):
        raise Inputs(f"two inputs have one name: {', '.join(names)}")
    for name, sizes in given.items():
        if name not in names:
            raise Inputs(f"there is no input {name}: the model takes {', '.join(names)}")
        shape = specs[names.index(name)][1]
        if len(sizes) != len(shape) or any(a not in (None, b) for a, b in zip(shape, sizes, strict=True)):
            wanted = "x".join("?" if size is None else str(size) for size in shape)
            raise Inputs(f"input {name} is {wanted}, not {'x'.join(map(str, sizes))}")
    return specs


def _example_shape(shape: Sequence[int | None], batch: int) -> list[int]:
    other = _EDGE if len(shape) == 4 else _SEQUENCE
    return [size if size is not None else batch if axis == 0 else other for axis, size in enumerate(shape)]


def _example(sizes: Sequence[int], dtype: str) -> torch.Tensor:
    """Random floats; zeros and ones for integers (valid tokens nearly everywhere), True for booleans."""
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    if kind.is_floating_point:
        return torch.randn(tuple(sizes), generator=generator).to(kind)
    return torch.ones(tuple(sizes), dtype=kind)


def _exported(
    wrapper: Named, inputs: dict[str, torch.Tensor], varying: dict[str, dict[int, Any]], path: Path
) -> tuple[Any, list[str]]:
    """The exported program, and which of the open axes had to be fixed, and why."""
    notes = []
    if any(varying.values()):
        try:
            shapes = {name: axes or None for name, axes in varying.items()}
            exported = torch.export.export(wrapper, (), inputs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            notes.append(f"all shapes are fixed: with varying ones torch.export stops ({_first_line(error)})")
        else:
            return exported, _fixed(exported, varying)
    try:
        return torch.export.export(wrapper, (), inputs, strict=False), notes
    except Exception as error:
        raise ValueError(f"torch.export cannot capture {path}: {_first_line(error)}") from error


def _fixed(exported: Any, varying: dict[str, dict[int, Any]]) -> list[str]:
    shapes = {node.name: node.meta["val"].shape for node in exported.graph.nodes if node.op == "placeholder"}
    names = dict(zip(varying, exported.graph_signature.user_inputs, strict=True))
    return [
        f"axis {axis} of {name} is fixed at {shapes[names[name]][axis]}: Keras unrolls the model at that size"
        for name, axes in varying.items()
        for axis in axes
        if str(shapes[names[name]][axis]).isdigit()  # a SymInt may stand for a number
    ]


def _compare(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    for name, value in expected.items():
        gap = (found[name].double() - value.double()).abs().nan_to_num(0.0)
        scale = value.double().abs().nan_to_num(0.0).max() if value.numel() else 0.0
        if value.numel() and float(gap.max()) > _TOLERANCE * float(scale):
            raise ValueError(f"{path}: the captured graph computes another {name} than Keras, off by {gap.max():.3g}")


def _identifier(name: str) -> str:
    plain = re.sub(r"\W+", "_", name).strip("_") or "input"
    return f"input_{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) or plain == "self" else plain


def _shapes(inputs: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0]
