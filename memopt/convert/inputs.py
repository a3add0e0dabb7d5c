"""Example inputs of a conversion: parsed from text, named, and which of their axes may vary."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_LARGEST = 2**34  # elements; more is a typing error

# What the axes of well-known inputs mean. `decoder_sequence` is a sequence axis that varies on its own.
_TOKENS, _DECODER_TOKENS = {0: "batch", 1: "sequence"}, {0: "batch", 1: "decoder_sequence"}
KNOWN_AXES: Mapping[str, Mapping[int, str]] = {
    "input_ids": _TOKENS,
    "attention_mask": _TOKENS,
    "token_type_ids": _TOKENS,
    "position_ids": _TOKENS,
    "inputs_embeds": _TOKENS,
    "bbox": _TOKENS,
    "input_values": _TOKENS,
    "decoder_input_ids": _DECODER_TOKENS,
    "decoder_attention_mask": _DECODER_TOKENS,
    "input_features": {0: "batch"},
    "pixel_values": {0: "batch"},
    "images": {0: "batch"},
}
_IMAGE_AXES = {2: "height", 3: "width"}


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """An input as typed on the command line: `NAME=2x3x224x224:float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        """Random floats, ones for integers (a valid token, index or mask nearly everywhere), True for booleans."""
        if self.dtype.is_floating_point:
            return torch.randn(self.shape).to(self.dtype)
        return torch.ones(self.shape, dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Which axes may vary.

    Attributes:
        names: axes by their meaning (`batch`, `sequence`, …); None: the default, whatever can.
        axes: axes by place, input name → axis → name.
    """

    names: tuple[str, ...] | None = None
    axes: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)

    @property
    def required(self) -> bool:
        """Whether an axis that cannot vary is an error, not a note."""
        return self.names is not None


def parse_input(text: str) -> InputSpec:
    """Read `NAME=2x3x224x224:float32`; the dtype is float32 where none is given.

    Raises:
        ValueError: the text is of another form.
    """
    name, _, rest = text.partition("=")
    sizes, _, dtype = rest.partition(":")
    # ONNX files call their inputs as they like: `input.1`, `images:0`.
    if not re.fullmatch(r"\S+", name) or not re.fullmatch(r"\d+(x\d+)*|scalar", sizes):
        raise ValueError(f"{text!r} is no input: write NAME=2x3x224x224:float32")
    if (dtype or "float32") not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use one of {', '.join(_DTYPES)}")
    shape = () if sizes == "scalar" else tuple(int(size) for size in sizes.split("x"))
    elements = 1
    for size in shape:
        elements *= size
    if elements == 0 or elements > _LARGEST:
        raise ValueError(f"{text!r} has {elements} elements: between 1 and {_LARGEST} are needed")
    return InputSpec(name, shape, _DTYPES[dtype or "float32"])


def parse_inputs(texts: Sequence[str]) -> list[InputSpec]:
    """Read several inputs, in order.

    Raises:
        ValueError: a text is of another form, or an input is given twice.
    """
    specs: dict[str, InputSpec] = {}
    for text in texts:
        spec = parse_input(text)
        if spec.name in specs:
            raise ValueError(f"input {spec.name} is given twice")
        specs[spec.name] = spec
    return list(specs.values())


def parse_dynamic(text: str) -> Dynamic:
    """Read `batch,sequence`, `x:0=rows,batch`, or `none`.

    Raises:
        ValueError: the text is of another form.
    """
    names: list[str] = []
    axes: dict[str, dict[int, str]] = {}
    for part in (part.strip() for part in text.split(",")):
        placed = re.fullmatch(r"(\w+):(\d+)(?:=(\w+))?", part)
        if placed:
            name, axis, label = placed.groups()
            axes.setdefault(name, {})[int(axis)] = label or f"{name}_{axis}"
        elif part.isidentifier():
            names.append(part)
        else:
            raise ValueError(f"{part!r} is no axis: write batch, sequence, height, width, NAME:AXIS=LABEL, or none")
    if "none" in names:
        if len(names) > 1 or axes:
            raise ValueError("none goes with no other axis")
        return Dynamic(())
    return Dynamic(tuple(names), axes)


def named(model: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by the names of forward's arguments.

    Raises:
        TypeError: forward does not take them, or gives them no names.
    """
    if isinstance(inputs, Mapping):
        return dict(inputs)
    signature = inspect.signature(model.forward)
    bound = signature.bind(*inputs)
    for name in bound.arguments:
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            raise TypeError(f"{type(model).__name__}.forward takes *{name}: its inputs have no names")
    return dict(bound.arguments)


def dynamic_axes(inputs: Mapping[str, Any], dynamic: Dynamic) -> dict[str, dict[int, str]]:
    """The axes that shall vary, input name → axis → label.

    Raises:
        ValueError: a named axis is found in no input, or an axis lies outside its input.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    chosen: dict[str, dict[int, str]] = {}
    for name, value in tensors.items():
        meanings = _meanings(name, value, asked=dynamic.required)
        for axis, label in meanings.items():
            wanted = label != "height" and label != "width" if dynamic.names is None else _asked(label, dynamic.names)
            if wanted and axis < value.dim():
                chosen.setdefault(name, {})[axis] = label
    for name, axes in dynamic.axes.items():
        if name not in tensors:
            raise ValueError(f"there is no input {name}: the inputs are {', '.join(inputs)}")
        for axis, label in axes.items():
            if axis >= tensors[name].dim():
                raise ValueError(f"input {name} has {tensors[name].dim()} axes: there is no axis {axis}")
            chosen.setdefault(name, {})[axis] = label
    for label in dynamic.names or ():
        if not any(_asked(found, (label,)) for axes in chosen.values() for found in axes.values()):
            raise ValueError(f"no input has an axis {label}: say which one, NAME:AXIS={label}")
    return chosen


def _meanings(name: str, value: torch.Tensor, *, asked: bool) -> dict[int, str]:
    """What the axes of an input are, as far as its name says; where axes are asked for, as its shape suggests too."""
    known = dict(KNOWN_AXES.get(name, {}))
    if not known and asked and value.dim():
        known = {0: "batch"}
        if not value.is_floating_point() and value.dim() == 2:
            known[1] = "sequence"
    if value.dim() == 4 and value.is_floating_point():
        known.update(_IMAGE_AXES)
    return known


def _asked(label: str, names: Sequence[str]) -> bool:
    return label in names or (label == "decoder_sequence" and "sequence" in names)
