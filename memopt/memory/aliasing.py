"""Which storages the values of a program live in: the unit in which memory is counted."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from memopt.graph.propagation import run_fake
from memopt.memory.rounding import allocated_bytes
from memopt.program import Program
from memopt.torch_compat import pytree
from memopt.torch_compat.storages import storage_id

_FINISHED: WeakKeyDictionary[Program, Aliasing] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Storage:
    """One block of memory.

    Attributes:
        index: its position in `Aliasing.storages`.
        producer: the node that creates it: a placeholder, or the call that allocates it.
        nbytes: the bytes that it takes of its device's allocator.
    """

    index: int
    producer: fx.Node
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Aliasing:
    """The storages of a program.

    Attributes:
        storages: every storage, in order of creation.
        of: per node, the storages that its value refers to, one per tensor in the value, in order.
    """

    storages: tuple[Storage, ...]
    of: dict[fx.Node, tuple[int, ...]]

    def created_by(self, node: fx.Node) -> list[int]:
        """The storages that this node allocates."""
        return [index for index in dict.fromkeys(self.of.get(node, ())) if self.storages[index].producer is node]


def analyse(program: Program, values: Mapping[fx.Node, Any] | None = None) -> Aliasing:
    """Find the storages of every value by running the program on fake tensors.

    A view shares the storage of its base, an operation with several results has several storages, and a node that is
    annotated `meta["inplace"] = k` takes over the storage of its argument k. A value that is annotated `meta["fused"]`
    is never stored: it stands for the storages that it is computed from, as a view does.

    Args:
        program: any program.
        values: every node's value from such a run, where one was made already.
    """
    values = run_fake(program.graph_module) if values is None else values
    storages: list[Storage] = []
    index_of: dict[int, int] = {}
    of: dict[fx.Node, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        if node not in values:
            continue
        if node.meta.get("fused"):
            of[node] = tuple(dict.fromkeys(index for operand in node.all_input_nodes for index in of.get(operand, ())))
            continue
        indices = []
        for position, leaf in enumerate(pytree.tree_leaves(values[node])):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.layout is not torch.strided:
                key, nbytes = id(leaf), leaf.numel() * leaf.element_size()
            else:
                key, nbytes = storage_id(leaf), leaf.untyped_storage().nbytes()
            if key not in index_of:
                reused = node.meta.get("inplace") if position == 0 and node.op == "call_function" else None
                if reused is not None:
                    index_of[key] = of[node.args[reused]][0]
                else:
                    index_of[key] = len(storages)
                    storages.append(Storage(len(storages), node, allocated_bytes(int(nbytes), leaf.device)))
            indices.append(index_of[key])
        of[node] = tuple(indices)
    return Aliasing(tuple(storages), of)


def of_finished(program: Program) -> Aliasing:
    """The storages of a program that nobody edits any more, marks included: found once, whoever asks."""
    if program not in _FINISHED:
        _FINISHED[program] = analyse(program)
    return _FINISHED[program]


def owner(node: fx.Node) -> fx.Node:
    """The operation that makes the node's value: for an item of a multiple result the operation, else the node."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node
