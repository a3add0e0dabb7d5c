"""What Inductor is set to, and where it keeps its files; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch._inductor import config


def may_multiply_convolutions() -> bool:
    """Whether Inductor may run a convolution as a product of matrices."""
    return bool(config.conv_1x1_as_mm or config.max_autotune or config.max_autotune_gemm)


def inductor_settings(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Within: these settings of `torch._inductor.config`."""
    patch: contextlib.AbstractContextManager[Any] = config.patch(dict(settings))
    return patch


def partitioner_in_force() -> Any:
    """The partitioner that Inductor has instead of its own; None where it has its own."""
    return config.custom_partitioner_fn


def pads_in_place() -> bool:
    """Whether Inductor leaves room behind rows, and pads matrices within it."""
    return bool(config.inplace_padding and config.comprehensive_padding)


def rows_begin_at() -> int:
    """The bytes at whose multiples Inductor lets long rows begin."""
    return int(config.padding_alignment_bytes)


def longest_unpadded_row() -> int:
    """Elements of the longest row that Inductor leaves as it is."""
    return int(config.padding_stride_threshold)


def most_reads_inside() -> int:
    """The most values that one may be made of that Inductor computes within each of several readers."""
    return int(config.realize_reads_threshold)


def threshold(kind: str, on_cpu: bool) -> int:
    """From which on Inductor stores a value: "opcount" by operations, "acc_reads" by values read.

    Since torch 2.12 the setting has a default, and another one on CPU, where the user sets none.
    """
    value = getattr(config, f"realize_{kind}_threshold")
    if value is not None:
        return int(value)
    return int(getattr(config, f"realize_cpu_{kind}_threshold" if on_cpu else f"_realize_{kind}_threshold_default"))


def compiles_alone() -> bool:
    """Whether Inductor compiles in this process only, as TORCHINDUCTOR_COMPILE_THREADS=1 asks it to."""
    return config.compile_threads == 1


def caches_code() -> bool:
    """Whether Inductor keeps the code of graphs on disk, and loads it from there."""
    return bool(config.fx_graph_cache and not config.force_disable_caches)
