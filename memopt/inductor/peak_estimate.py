"""An estimate of what a partition takes as Inductor's code, known before any code is generated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import fx

from memopt.inductor.fusion import stored_reads
from memopt.inductor.peak_lower_bound import larger_graph, memory_of, read_by, there_at_first
from memopt.memory.hand_over import handed_of
from memopt.patterns.overwrites import written_over
from memopt.program import is_any_view
from memopt.solve.liveness import profile
from memopt.solve.lives import shared_bytes
from memopt.torch_compat.inductor_compile import lays_out_channels_last

# Of graphs that were looked at before, by their forward: whoever chooses between two cuts asks, and who uses one.
_known: WeakKeyDictionary[fx.GraphModule, tuple[fx.GraphModule, int, int]] = WeakKeyDictionary()
# What forward graphs take, which is the same whatever order backward has.
_forwards: WeakKeyDictionary[fx.GraphModule, int] = WeakKeyDictionary()


def expected_bytes(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> int:
    """About the bytes that both graphs take, above what was there before: what is fused away takes none.

    Each runs in its own order, and a kernel writes over what it reads last, unless several of its values are computed
    of that, or it waited for backward. Inputs that are saved in another layout are there twice. Code took 0 to
    6 % more for transformers and a U-Net, up to a quarter more for networks of convolutions, whose batch norms read
    what would be fused.

    Args:
        forward: the forward graph; its placeholders were there before.
        backward: the backward graph, on placeholders that forward made, that were there before, or that are tangents.
        outputs: how many leading outputs of forward the caller gets, and holds.
    """
    known = _known.get(forward)
    if known is None or known[:2] != (backward, outputs):

        def peak(module: fx.GraphModule, there: Collection[int], held: Mapping[int, int]) -> int:
            if module is not forward:
                return _peak(module, there, held)
            if module not in _forwards:
                _forwards[module] = _peak(module, there, held)
            return _forwards[module]

        taken = larger_graph(forward, backward, outputs, peak) + _relaid_bytes(forward, outputs)
        known = _known[forward] = (backward, outputs, taken)
    return known[2]


def _relaid_bytes(forward: fx.GraphModule, outputs: int) -> int:
    """Bytes of inputs that Inductor saves for backward as copies, channels last, where it lays convolutions out so."""
    convolutions = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    if not convolutions or not lays_out_channels_last(forward):
        return 0
    results: Any = forward.graph.output_node().args[0]
    saved = {value for value in results[outputs:] if isinstance(value, fx.Node) and value.op == "placeholder"}
    read = {operand for node in convolutions for operand in node.args[:2]}
    values = [node.meta["val"] for node in saved & read]
    return sum(v.nbytes for v in values if v.dim() == 4 and not v.is_contiguous(memory_format=torch.channels_last))


def _peak(module: fx.GraphModule, there: Collection[int], held: Mapping[int, int]) -> int:
    reads, fused, calls = stored_reads(module.graph)
    nodes = [node for node in module.graph.nodes if node not in fused]
    own = memory_of(nodes, there)
    handed = handed_of(module)
    last: dict[int, int] = {}
    computed: dict[int, int] = {}  # the last node that computes something of it
    shared: set[int] = set()  # what several nodes of a window read: one kernel may read it until it ends
    window = 0  # the last library call
    for index, node in enumerate(nodes):
        if node in calls:
            window = index
        read = {key for argument in read_by(node, handed) for stored in reads[argument] for key in own[stored]}
        if node in handed:
            last.update(dict.fromkeys(own[node], index))
        for key in read:
            last[key] = index
            if not is_any_view(node):
                (shared.add if computed.get(key, -1) > window else shared.discard)(key)
                computed[key] = index
    dying: dict[int, list[int]] = {}
    for key, index in last.items():
        if key not in held:
            dying.setdefault(index, []).append(key)
    sizes = there_at_first(nodes, own, held)
    there_before = frozenset(sizes)
    kept = shared | there_before
    born, spared = dict.fromkeys(sizes, 0), list[int]()
    for index, node in enumerate(nodes):
        ends = dying.get(index, ())
        made: dict[int, int] = {}
        if node.op == "call_function":
            made = {key: size for key, size in own[node].items() if key in last and key not in born}
        over = written_over(node)
        if over is not None:
            alone = [key for key in own.get(over, ()) if key in ends and key not in there_before]
        else:
            alone = [key for key in ends if key not in kept] if node not in calls else []
        # A kernel may write over what it alone reads last, and over what it is said to.
        spared.append(shared_bytes(made.values(), [sizes[key] for key in alone if key in born]))
        born.update(dict.fromkeys(made, index))
        sizes.update(made)
    gone = {key: index + 1 for index, keys in dying.items() for key in keys}
    spans = [(first, gone.get(key, len(nodes)), sizes[key]) for key, first in born.items()]
    return int((profile(len(nodes), spans) - np.array(spared)).max(initial=0))
