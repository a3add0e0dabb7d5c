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
    configs = {id(part): part for part in parts if part is not None and hasattr(part, "use_cache")}.values()
    before = [(config, config.use_cache) for config in configs]
    experts = getattr(model.config, "_experts_implementation", None)
    for config in configs:
        config.use_cache = False
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value
        if hasattr(model, "set_experts_implementation") and experts is not None:
            model.set_experts_implementation(experts)
