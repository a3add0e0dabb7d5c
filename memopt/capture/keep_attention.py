"""Masks that tracing alone builds, taken out of Dynamo's graphs so that attention keeps its fused kernels.

Models ask whether a mask does anything, and pass none, or `is_causal`, when it does not. They cannot ask while Dynamo
traces them, so the traced graph holds the whole mask. PyTorch chooses attention's kernel while AOTAutograd traces that
graph: with a mask, flash attention is out; with a mask whose last stride is not 1 (an expanded one) every fused kernel
is on CUDA, and attention becomes products and a softmax that backward keeps. No later rewrite can know what was meant.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_aggregate

from memopt.graph.rewrite import ancestors
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.operators import attention_function

LARGEST = 2**26
"""Elements of the largest mask that is computed to see whether it does anything."""

_ATTENTION = (attention_function(), F.scaled_dot_product_attention)
_MASK, _DROPOUT, _CAUSAL = 3, 4, 5  # positions of the arguments
_DRAWS = ("rand", "bernoulli", "normal", "multinomial", "dropout", "exponential", "poisson", "empty")
# Added to any score that a model computes, a number as low as this leaves nothing of it.
_HIDING = -1e30


def keep_fused_attention(graph_module: fx.GraphModule) -> int:
    """Edit Dynamo's graph in place, before it is lowered; return how many attentions were changed.

    1. A mask that the graph computes from nothing but literals, and that hides nothing, is dropped.
    2. One that hides exactly what comes later, for as many queries as keys, becomes `is_causal=True`.
    3. On other devices than the CPU, any other mask whose last stride is not 1 is copied, once for all who read it.

    What attention computes stays the same: a hidden score has probability 0 either way, and no row is hidden wholly.
    """
    graph = graph_module.graph
    facts: dict[fx.Node, str | None] = {}
    copies: dict[fx.Node, fx.Node] = {}
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _ATTENTION:
            continue
        mask = _argument(node, _MASK, "attn_mask")
        if not isinstance(mask, fx.Node) or _argument(node, _CAUSAL, "is_causal"):
            continue
        value = mask.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            continue
        if mask not in facts:
            facts[mask] = _fact(graph, mask)
        if facts[mask] is not None and _fits(node, value, facts[mask]):
            _set(node, None, facts[mask] == "causal")
        elif value.device.type != "cpu" and value.ndim and value.stride(-1) != 1:
            if mask not in copies:
                with graph.inserting_after(mask):
                    copies[mask] = graph.call_function(torch.clone, (mask,), {"memory_format": torch.contiguous_format})
            _set(node, copies[mask], False)
        else:
            continue
        changed += 1
    if changed:
        graph_module.recompile()
    return changed


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _set(node: fx.Node, mask: fx.Node | None, causal: bool) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    for position, name, value in ((_MASK, "attn_mask", mask), (_CAUSAL, "is_causal", causal)):
        if len(args) > position:
            args[position] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs


def _fits(node: fx.Node, mask: torch.Tensor, fact: str | None) -> bool:
    """Whether the mask spans whole rows of scores; broadcast in them it would not be what its own shape says."""
    sizes = [operand.meta["example_value"].shape[-2] for operand in node.args[:2] if isinstance(operand, fx.Node)]
    if len(sizes) != 2:
        return False
    return fact == "nothing" or (sizes[0] == sizes[1] and list(mask.shape[-2:]) == sizes)


def _fact(graph: fx.Graph, mask: fx.Node) -> str | None:
    """What a mask does: "nothing", "causal" where it hides exactly what comes later; None where it cannot be known."""
    value = _computed(graph, mask)
    if value is None or value.ndim < 2:
        return None
    shown = value if value.dtype is torch.bool else value == 0
    if bool(shown.all()):
        return "nothing"
    rows, columns = value.shape[-2:]
    if rows != columns:
        return None
    earlier = torch.ones(rows, columns, dtype=torch.bool, device=value.device).tril_()
    hidden = ~value if value.dtype is torch.bool else value <= _HIDING
    return "causal" if bool(torch.where(earlier, shown, hidden).all()) else None


def _computed(graph: fx.Graph, mask: fx.Node) -> torch.Tensor | None:
    """The mask's value, where the graph computes it from literals alone; None where it cannot be known."""
    needed = ancestors([mask])
    if any(node.op not in ("call_function", "call_method") or _draws(node) for node in needed):
        return None
    if any(ancestors([written]) & needed for node in graph.nodes for written in _written(node)):
        return None
    for node in needed:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.numel() > LARGEST:
            return None
    values: dict[fx.Node, Any] = {}
    try:
        with no_fake_mode(), torch.no_grad():
            for node in graph.nodes:
                if node in needed:
                    args, kwargs = map_aggregate(
                        (node.args, node.kwargs),
                        lambda item: values[item] if isinstance(item, fx.Node) else _here(item),
                    )
                    values[node] = (
                        getattr(args[0], str(node.target))(*args[1:], **kwargs)
                        if node.op == "call_method"
                        else node.target(*args, **kwargs)
                    )
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):  # it needs its own context
        return None
    found = values[mask]
    return found if isinstance(found, torch.Tensor) and found.numel() else None


def _here(item: Any) -> Any:
    """The CPU in place of another device: what it costs to look at a mask is no matter of the budget."""
    if isinstance(item, torch.device) or (isinstance(item, str) and item.startswith(("cuda", "xpu", "mps"))):
        return torch.device("cpu")
    return item


def _name(node: fx.Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", node.target))


def _draws(node: fx.Node) -> bool:
    return any(word in _name(node) for word in _DRAWS)


def _written(node: fx.Node) -> list[fx.Node]:
    """The tensors that the operation may write to."""
    out = node.kwargs.get("out")
    written = [out] if isinstance(out, fx.Node) else []
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__") and node.target not in _PLAIN
    if in_place or name in _IN_PLACE or node.kwargs.get("inplace"):
        written += [argument for argument in node.args[:1] if isinstance(argument, fx.Node)]
    return written


_PLAIN = (operator.and_, operator.or_, operator.not_, operator.is_)
_IN_PLACE = frozenset({
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor", "ipow", "ilshift", "irshift",
    "imatmul", "setitem", "__setitem__",
})  # fmt: skip
