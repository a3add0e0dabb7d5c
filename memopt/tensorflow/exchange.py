"""Tensors between processes, by a file: torch here, numpy in `worker.py`; bfloat16 and 0-d tensors included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to `NAME.bin`, one after another, and what they are to `NAME.json`."""
    index: dict[str, list[object]] = {}
    with (folder / f"{name}.bin").open("wb") as file:
        for key, tensor in tensors.items():
            index[key] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), file.tell()]
            plain = tensor.detach().to("cpu", memory_format=torch.contiguous_format).contiguous()
            if plain.numel():
                file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
    (folder / f"{name}.json").write_text(json.dumps(index))


def read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What `write`, or the worker's, has written."""
    data = (folder / f"{name}.bin").read_bytes()
    found = {}
    for key, (kind, shape, start) in json.loads((folder / f"{name}.json").read_text()).items():
        dtype: torch.dtype = getattr(torch, kind)
        count = torch.Size(shape).numel()
        if count:
            found[key] = torch.frombuffer(bytearray(data[start : start + count * dtype.itemsize]), dtype=dtype)
        else:
            found[key] = torch.empty(0, dtype=dtype)
        found[key] = found[key].reshape(shape)
    return found
