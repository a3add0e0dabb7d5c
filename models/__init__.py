"""Reference models in plain PyTorch, each at its real size and at a tiny one: `build("gpt2")`, `build("gpt2:tiny")`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from memopt.models import mobilenet_v3
from memopt.models.base import ImageModel, TokenModel
from memopt.models.bert import BertForMaskedLM
from memopt.models.densenet import DenseNet
from memopt.models.gpt2 import GPT2
from memopt.models.llama import Llama, RotaryScaling
from memopt.models.mobilenet_v3 import MobileNetV3
from memopt.models.resnet import BasicBlock, Bottleneck, ResNet
from memopt.models.unet import UNet
from memopt.models.vit import ViT

Model: TypeAlias = ImageModel | TokenModel


class Entry(NamedTuple):
    """How a model is made: a callable that gives the real size, and the options that make it tiny."""

    factory: Callable[..., Model]
    tiny: Mapping[str, Any]


_IMAGES: dict[str, Any] = {"classes": 10, "resolution": 64}
_BERT: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "hidden": 64, "vocabulary": 128, "positions": 32, "sequence": 16
}  # fmt: skip
_GPT2: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 128, "positions": 32, "sequence": 16}
_LLAMA: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64, "vocabulary": 128, "sequence": 16
}  # fmt: skip

REGISTRY: Mapping[str, Entry] = {
    "resnet18": Entry(
        functools.partial(ResNet, BasicBlock, layers=(2, 2, 2, 2)), {"layers": (2, 1, 1, 1), "width": 8, **_IMAGES}
    ),
    "resnet50": Entry(
        functools.partial(ResNet, Bottleneck, layers=(3, 4, 6, 3)), {"layers": (2, 1, 1, 1), "width": 8, **_IMAGES}
    ),
    "resnet152": Entry(
        functools.partial(ResNet, Bottleneck, layers=(3, 8, 36, 3)), {"layers": (1, 2, 3, 1), "width": 8, **_IMAGES}
    ),
    "mobilenet_v3_large": Entry(MobileNetV3, {"rows": mobilenet_v3.LARGE_TINY, "hidden": 64, **_IMAGES}),
    "mobilenet_v3_small": Entry(
        functools.partial(MobileNetV3, rows=mobilenet_v3.SMALL, hidden=1024),
        {"rows": mobilenet_v3.SMALL_TINY, "hidden": 64, **_IMAGES},
    ),
    "densenet121": Entry(DenseNet, {"layers": (2, 2, 2), "growth": 8, "width": 16, **_IMAGES}),
    "densenet161": Entry(
        functools.partial(DenseNet, layers=(6, 12, 36, 24), growth=48, width=96),
        {"layers": (2, 3, 2), "growth": 12, "width": 24, **_IMAGES},
    ),
    "unet": Entry(UNet, {"width": 8, "depth": 2, "resolution": 32}),
    "vit_b_16": Entry(
        ViT, {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "patch": 8, "classes": 10, "resolution": 32}
    ),
    "bert_base": Entry(BertForMaskedLM, _BERT),
    "bert_large": Entry(
        functools.partial(BertForMaskedLM, layers=24, width=1024, heads=16, hidden=4096), {**_BERT, "layers": 3}
    ),
    "gpt2": Entry(GPT2, _GPT2),
    "gpt2_medium": Entry(functools.partial(GPT2, layers=24, width=1024, heads=16), {**_GPT2, "layers": 3}),
    "llama_tiny": Entry(
        functools.partial(
            Llama,
            layers=6,
            width=288,
            heads=6,
            kv_heads=6,
            hidden=768,
            vocabulary=32000,
            sequence=256,
            theta=10000.0,
        ),
        {**_LLAMA, "kv_heads": 4},
    ),
    "llama_1b": Entry(functools.partial(Llama, scaling=RotaryScaling()), _LLAMA),
}


def names() -> tuple[str, ...]:
    """The names that `build` takes."""
    return tuple(REGISTRY)


def build(name: str, *, tiny: bool = False, **overrides: Any) -> Model:
    """Make a model with random weights, on the default device and in the default dtype.

    Args:
        name: one of `names()`; with ":tiny" appended, the tiny size.
        tiny: whether to make the tiny size: the same kinds of blocks, few and narrow, for small inputs.
        overrides: options of the model's class, such as dropout=0.0 (which every model takes).

    Raises:
        ValueError: there is no such model.
        TypeError: the model has no such option.
    """
    known, colon, size = name.partition(":")
    if known not in REGISTRY or (colon and size != "tiny"):
        close = difflib.get_close_matches(known, REGISTRY, n=1, cutoff=0.4)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"no model {name!r}{hint}; known, each also as NAME:tiny: {', '.join(REGISTRY)}")
    entry = REGISTRY[known]
    options = {**(entry.tiny if tiny or colon else {}), **overrides}
    accepted = inspect.signature(entry.factory).parameters
    for option in options:
        if option not in accepted:
            raise TypeError(f"model {known} has no option {option!r}; it has: {', '.join(accepted)}")
    return entry.factory(**options)
