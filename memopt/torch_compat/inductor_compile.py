"""Inductor's pipeline, from a graph to a function, and the code of its forward and backward; 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._inductor import codecache, compile_fx, ir
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import needs_fallback_due_to_atomic_add_limitations, op_dtype_propagation_rules
from torch.fx.experimental import _config as shapes_config

from memopt.torch_compat.patched import replaced

Call = Callable[[list[Any]], Any]

# Reductions over rows and over columns of few elements are fused too, rather than asked how many there are.
_FOR_ALL_SIZES = {"triton.mix_order_reduction_non_strict_mode": True}
_LOADER = "load_by_key_path"  # loads every module that Inductor generated, those of kernels too


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], lower: Callable[..., Any], settings: Mapping[str, Any]
) -> Any:
    """A graph compiled as torch.compile does; `lower` compiles what AOTAutograd traces of it, under these settings.

    Args:
        module: a graph of Dynamo's, or a functional one; it is edited.
        inputs: its arguments, fake ones or real ones.
        lower: takes what `compile_traced` takes, and returns what it returns.
        settings: of Inductor.
    """
    return compile_fx.compile_fx(module, inputs, inner_compile=lower, config_patches=dict(settings))


def compile_traced(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The function of a graph that AOTAutograd has traced: it takes its arguments in a list, and empties it.

    Where Inductor would look at symbolic sizes only to choose faster code, it takes what holds for all: on a GPU a
    GPT-2 was compiled anew for lengths that are no multiple of 8, for few tokens, and for both (also by torch.compile).
    """
    with types_ruled_once():
        return _compile_traced(module, inputs, **options)


def _compile_traced(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    symbol = next((value for value in inputs if isinstance(value, torch.SymInt)), None)
    if symbol is None:
        return compile_fx.compile_fx_inner(module, inputs, **options)
    aligned, shapes, settings = ir.is_aligned_realized_tensor, cast(Any, shapes_config), cast(Any, inductor_config)

    def aligned_for_all(x: Any, alignment: int) -> bool:
        # Only here: a slice lowered so asks for what only sizes that nobody knows have, and views of two sizes fail.
        with shapes.patch(backed_size_oblivious=True):
            return bool(aligned(x, alignment))

    with replaced(ir, "is_aligned_realized_tensor", aligned_for_all), settings.patch(_FOR_ALL_SIZES):
        compiled = compile_fx.compile_fx_inner(module, inputs, **options)
    _give_strides_of_all_sizes(compiled, symbol.node.shape_env)
    return compiled


@contextlib.contextmanager
def types_ruled_once() -> Iterator[None]:
    """Within: what tells the types of operations' results learns its rules once, and anew where rules were added.

    Inductor has one such object, but asks for it at each operation of each kernel, and each time it learns them all.
    """
    plain, known = DtypePropagationOpsHandler.__init__, -1

    def learn(handler: DtypePropagationOpsHandler) -> None:
        nonlocal known
        if known != len(op_dtype_propagation_rules):
            plain(handler)
            known = len(op_dtype_propagation_rules)

    with replaced(DtypePropagationOpsHandler, "__init__", learn):
        yield


def _give_strides_of_all_sizes(compiled: Any, shapes: Any) -> None:
    """AOTAutograd lays out what backward takes as forward's code does: by symbols, not by this call's sizes."""
    context = TracingContext.try_get()
    reported, strides = context and context.output_strides, getattr(compiled, "output_strides", None) or ()
    if reported and len(reported) == len(strides):
        reported[:] = [text and tuple(map(shapes.deserialize_symexpr, text)) for text in strides]


@contextlib.contextmanager
def backward_begins_with(around: Callable[[Call], Call]) -> Iterator[None]:
    """Within: backward's function, be it compiled or loaded, is what `around` makes of it.

    Before torch 2.13 Inductor copies arguments that are not aligned before its code runs, and expects all to be there.
    """
    plain = CompiledFxGraph.post_compile

    def finished(graph: Any, inputs: Any, constants: Any, options: Any) -> None:
        plain(graph, inputs, constants, options)
        if options["is_backward"] and graph.current_callable is not None:
            graph.current_callable = around(graph.current_callable)

    with replaced(CompiledFxGraph, "post_compile", finished):
        yield


def code_cache_hits() -> int:
    """How often Inductor has loaded the code of a graph from disk in this process."""
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
