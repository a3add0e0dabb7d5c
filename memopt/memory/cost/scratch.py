"""What an operator takes beside its results, estimated where it cannot be run."""

from __future__ import annotations

import torch
from torch import fx

from memopt.memory.cost.roofline import makes_nothing, operands_of, span
from memopt.memory.rounding import allocated_bytes
from memopt.program import tensors_of

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_SORTS = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


def output_bytes(node: fx.Node) -> int:
    """Bytes that the allocator takes for the node's results; 0 for views."""
    if makes_nothing(node):
        return 0
    sizes = {
        t.untyped_storage()._cdata: allocated_bytes(t.untyped_storage().nbytes(), t.device) for t in tensors_of(node)
    }
    return sum(sizes.values())


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that the node's operator may need while it runs, above operands and results.

    Of the operators that are known to need much: convolutions reorder their operands, sorting keeps a second copy of
    its results, the backward of attention accumulates the query's gradient apart. Others count as needing none.
    """
    if node.target in _CONVOLUTIONS:
        return sum(allocated_bytes(span(t) * t.element_size(), t.device) for t in operands_of(node))
    if node.target in _SORTS:
        return output_bytes(node)
    if "attention" in str(node.target) and "backward" in str(node.target):
        query = tensors_of(node)[0]
        return allocated_bytes(span(query) * query.element_size(), query.device)
    return 0
