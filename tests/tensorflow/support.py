"""Keras and TensorFlow models, made in processes of their own: the tests' process does not import these libraries."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_keras = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="needs memopt[tensorflow]")
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs memopt[tensorflow]")

TRANSFORMER = """
def transformer(layers, dropout=0.1, length=12):
    tokens = layers.Input((length,), dtype="int32", name="tokens")
    hidden = layers.Embedding(50, 32)(tokens)
    for _ in range(2):
        normed = layers.LayerNormalization()(hidden)
        hidden = layers.Add()([hidden, layers.MultiHeadAttention(4, 8)(normed, normed)])
        normed = layers.LayerNormalization()(hidden)
        wide = layers.Dropout(dropout)(layers.Dense(64, activation="gelu")(normed))
        hidden = layers.Add()([hidden, layers.Dense(32)(wide)])
    return tokens, layers.Dense(7, name="logits")(hidden)
"""


def script(folder: Path, code: str, *, backend: str = "torch", block: tuple[str, ...] = ()) -> str:
    """Run Python code in a fresh process in the folder, and return what it printed; imports of `block` fail there."""
    blocked = "".join(f"import sys; sys.modules[{name!r}] = None\n" for name in block)
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", blocked + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
