"""Steps planned for a loop that keeps the loss alone: what a model returns beside it is gone when backward begins.

`loss = model(**batch).loss` lets go of logits and caches as soon as forward has returned, which a plan may count on. A
loop that holds them all the same would take more than was planned: it is told so before backward takes any memory.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.budget import format_bytes
from memopt.capture.dynamo_graph import value_of
from memopt.common.garbage import collect
from memopt.program import OutputKind, Program, tensors_of
from memopt.torch_compat.storages import storage_id

_LET_GO = "let go of before backward"


def bytes_beside_numbers(graph_module: fx.GraphModule) -> int:
    """Bytes of what a graph of Dynamo's makes and returns, single numbers left out; of each value once."""
    returned: Any = graph_module.graph.output_node().args[0]
    nodes = {node for node in returned if isinstance(node, fx.Node) and node.op != "placeholder"}
    values = [value_of(node) for node in nodes]
    return sum(value.numel() * value.element_size() for value in values if _is_large(value))


def letting_go(program: Program) -> Program:
    """A training program of whose forward's results the caller keeps single numbers only, as a loss is one."""
    outputs = list(program.outputs)
    for number, value in enumerate(program.output_nodes[: program.forward_outputs]):
        made = isinstance(value, fx.Node) and outputs[number].kind is OutputKind.USER
        if made and any(map(_is_large, tensors_of(value))):
            outputs[number] = dataclasses.replace(outputs[number], let_go=True)
    return dataclasses.replace(program, outputs=tuple(outputs))


def mark_let_go(forward: fx.GraphModule, program: Program) -> None:
    """Have a forward graph know which of its outputs the caller lets go of; see `let_go_of`."""
    forward.meta[_LET_GO] = frozenset(place for place, output in enumerate(program.outputs) if output.let_go)


def let_go_of(forward: fx.GraphModule) -> frozenset[int]:
    """Positions of a forward graph's outputs that are gone when backward begins, where it was marked."""
    found: frozenset[int] = forward.meta.get(_LET_GO, frozenset())
    return found


def numbers_alone(run: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A compiled graph whose results are held as such a loop holds them: None stands for what is let go of."""

    def call(*args: Any) -> list[Any]:
        return [None if _is_large(value) else value for value in run(*args)]

    return call


def watched_for_outputs(run: Callable[..., Any], room: Callable[[], int], needed: str) -> Callable[..., Any]:
    """A compiled graph whose backward refuses to begin while the caller still holds what was to be let go of.

    Args:
        run: returns the outputs, one of them a loss.
        room: what the plan leaves of the budget, in bytes: outputs that are not larger may be held.
        needed: the budget that holding them takes, in words.
    """
    # Which outputs are looked at, the same in every call: by position, whether their memory is saved for backward.
    looked_at: dict[int, bool] | None = None

    def call(*args: Any) -> Any:
        nonlocal looked_at
        results = list(run(*args))
        loss = next((v for v in results if isinstance(v, torch.Tensor) and v.numel() == 1 and v.requires_grad), None)
        if loss is None or loss.grad_fn is None:
            return results
        if looked_at is None:
            looked_at = _looked_at(results, args, getattr(loss.grad_fn, "saved_tensors", ()))
        held = []
        for place, saved in looked_at.items():
            storage = results[place].untyped_storage()
            if saved and not results[place].requires_grad:  # else autograd holds the same tensor as the caller
                results[place] = results[place].detach()
            held.append((place, weakref.ref(results[place] if saved else storage), storage.nbytes()))
        loss.grad_fn.register_prehook(lambda gradients: _refuse(held, room(), needed))
        return results

    return call


def _refuse(held: Sequence[tuple[int, weakref.ref[Any], int]], room: int, needed: str) -> None:
    there = _still_there(held)
    if sum(size for _, size in there) > room:
        collect()  # a call that is planned leaves garbage, which may show its outputs
        there = _still_there(held)
    size = sum(size for _, size in there)
    if size > room:
        places = ", ".join(str(place) for place, _ in there[:3]) + (", …" if len(there) > 3 else "")
        raise RuntimeError(
            f"within its budget memopt has planned this step for a loop that keeps the loss alone, and output {places} "
            f"of the model's graph ({format_bytes(size, short=True)}) is still held as backward begins: that takes a "
            f"budget of {needed}, or let go of it first, as in `loss = model(...).loss`"
        )


def _still_there(held: Sequence[tuple[int, weakref.ref[Any], int]]) -> list[tuple[int, int]]:
    return [(place, size) for place, reference, size in held if reference() is not None]


def _looked_at(results: Sequence[Any], args: Sequence[Any], saved: Sequence[Any]) -> dict[int, bool]:
    """Positions of large outputs that are no argument's memory, and whether it is saved for backward."""
    theirs, kept = ({storage_id(value) for value in values if _is_strided(value)} for values in (args, saved))
    large = {place: storage_id(value) for place, value in enumerate(results) if _is_large(value)}
    return {place: memory in kept for place, memory in large.items() if memory not in theirs}


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_large(value: Any) -> bool:
    return _is_strided(value) and value.numel() > 1
