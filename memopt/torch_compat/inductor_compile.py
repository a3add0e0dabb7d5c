"""Inductor's pipeline: a graph becomes a function, each of its halves code; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import codecache, compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import needs_fallback_due_to_atomic_add_limitations

from memopt.torch_compat.patched import replaced

_LOADER = "load_by_key_path"  # loads every module that Inductor generated, those of kernels too


def lower_whole(
    module: fx.GraphModule, inputs: Sequence[Any], lower: Callable[..., Any], settings: Mapping[str, Any]
) -> Any:
    """A graph compiled as torch.compile does: through AOTAutograd, each half by `lower` and under these settings.

    Args:
        module: a graph of Dynamo's, or a functional one; it is edited.
        inputs: its arguments, fake ones or real ones.
        lower: takes what `lower_half` takes, and returns such a function.
        settings: of Inductor.
    """
    return compile_fx.compile_fx(module, inputs, inner_compile=lower, config_patches=dict(settings))


def lower_half(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The function of one half that AOTAutograd has traced, which takes its arguments in a list, and empties it."""
    return compile_fx.compile_fx_inner(module, inputs, **options)


def found_again() -> int:
    """How often Inductor has found the code of a graph on disk, in this process."""
    return int(counters["inductor"]["fxgraph_cache_hit"])


def lays_out_channels_last(forward: fx.GraphModule) -> bool:
    """Whether Inductor lays out the convolutions of a training step's forward channels last."""
    return bool(GraphLowering.decide_layout_opt(forward, is_inference=False))


def adds_one_by_one(dtype: Any) -> bool:
    """Whether Inductor leaves it to torch to add numbers of this type where several may go to one place."""
    return bool(needs_fallback_due_to_atomic_add_limitations(dtype))


@contextlib.contextmanager
def modules_loaded_by(around: Callable[[Callable[[], Any], str, Mapping[str, Any] | None], Any]) -> Iterator[None]:
    """Within: a module that Inductor generated is what `around` returns, of what loads it, its path, its attributes.

    The attributes are None for a kernel's own module. No setting says who loads what was generated.
    """
    load = getattr(codecache.PyCodeCache, _LOADER)

    def loading(key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any) -> Any:
        return around(lambda: load(key, path, linemap, attrs, **options), path, attrs)

    with replaced(codecache.PyCodeCache, _LOADER, staticmethod(loading)):
        yield
