"""Models of transformers without their key-value cache, for as long as they are converted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def is_hugging_face(model: Any) -> bool:
    """Whether the model is one of transformers."""
    return hasattr(model, "config") and hasattr(model, "main_input_name")


@contextlib.contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Let a model of transformers return no key-value cache while a block runs: nothing could use it as an output.

    Experts are run by the implementation that has a translation to ONNX. Other models are left as they are.
    """
    if not is_hugging_face(model):
        yield
        return
    parts = (getattr(module, "config", None) for module in model.modules())
    configs = {id(part): part for part in parts if part is not None}.values()  # of the whole before those of its parts
    before = [
        (config, name, getattr(config, name))
        for config in configs
        for name in ("use_cache", "_experts_implementation")
        if hasattr(config, name)
    ]
    try:
        for config, name, _ in before:
            if name == "use_cache":
                config.use_cache = False
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)
