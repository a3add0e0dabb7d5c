"""The entry point of `torch.compile(model, backend="memopt", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.api import make_options
from memopt.capture.boundary import at_boundary
from memopt.capture.dynamo import Hooks
from memopt.common.garbage import collecting_rarely
from memopt.common.one_piece import in_one_piece
from memopt.compilation.session import Session
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident, storage_bytes
from memopt.program import InputKind
from memopt.torch_compat.checked_results import keep_checks
from memopt.torch_compat.dynamo import keep_backward_of_functions
from memopt.torch_compat.function_outputs import keep_gradients_of_outputs
from memopt.torch_compat.gradients_let_go import let_gradients_go
from memopt.torch_compat.synthetic_bases import bases_told_rightly

_OPTIONS = ("budget", "backend", "passes", "verify", "optimizer", "allow")


def torch_compile_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compile one Dynamo graph within a budget.

    Dynamo shows one graph at a time and not the model: each graph is held to the whole budget, and a budget for a model
    with graph breaks is refused, since it cannot be shared out. `memopt.compile` can.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: its inputs, parameters and buffers among them.
        options: `budget`, `backend`, `passes`, `verify`, `optimizer` and `allow`, as `memopt.compile` takes them.

    Raises:
        ValueError: an option is unknown or not understood.
        BudgetError: no plan keeps the budget.
        RuntimeError: the model has graph breaks, and a budget was given.
    """

    def lowered(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(isinstance(value, torch.SymInt) for value in example_inputs):
            return _PerShape(lambda args: _compiled(graph_module, args, options, unknown))
        return _compiled(graph_module, example_inputs, options, unknown)

    check = (options or {}).get("verify", True) is not False
    return at_boundary(lowered, check=check)(graph_module, example_inputs)


# What Dynamo and AOTAutograd would trace otherwise has lost its gradient, or its check, before a backend is asked.
keep_backward_of_functions()
keep_gradients_of_outputs()
keep_checks()
let_gradients_go()


def _compiled(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    unknown: Mapping[str, Any],
) -> Callable[..., Any]:
    given = dict(options or {})
    for name in (*given, *unknown):
        if name not in _OPTIONS:
            raise ValueError(f"backend memopt: unknown option {name!r} (known: {', '.join(_OPTIONS)})")
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    chosen = make_options(device=device, **{"backend": "inductor", **given})
    session = Session(
        budget=chosen.budget,
        backend=chosen.engine,
        passes=chosen.passes,
        verify=chosen.verify,
        names=dict,
        resident=Resident(),
        table=CostTable(ceiling_bytes=None if chosen.budget is None else chosen.budget.bytes),
    )
    for text in chosen.notes:
        session.note(text)
    hooks = Hooks(session, graph_module, example_inputs)
    if chosen.budget is not None and hooks.graph_break:
        raise RuntimeError("a budget cannot be shared among several graphs here: call memopt.compile(model, budget)")
    kinds = [origin.kind for origin in hooks.origins]
    counted = chosen.counted([v for v, k in zip(example_inputs, kinds, strict=True) if k is InputKind.PARAMETER])
    session.counts_resident(
        Resident(
            parameters=storage_bytes(
                [v for v, k in zip(example_inputs, kinds, strict=True) if k is InputKind.PARAMETER]
            ),
            buffers=storage_bytes([v for v, k in zip(example_inputs, kinds, strict=True) if k is InputKind.BUFFER]),
            inputs=storage_bytes([v for v, k in zip(example_inputs, kinds, strict=True) if k is InputKind.USER]),
            optimizer=None if counted is None else counted.footprint,
            trainable=sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.requires_grad),
        )
    )
    for name in () if counted is None else counted.later:
        session.note(f"the state of {name} is not counted: a step on fake tensors does not tell it")
    try:
        with collecting_rarely(), bases_told_rightly():
            return in_one_piece(chosen.engine.compile_captured)(graph_module, example_inputs, hooks)
    finally:
        hooks.forget()


class _PerShape:
    """A graph with dynamic shapes, compiled for each shape that is met: a plan needs the bytes of every tensor."""

    def __init__(self, build: Callable[[Sequence[Any]], Callable[..., Any]]) -> None:
        self._build = build
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        key = (torch.is_grad_enabled(), *(_shape(value) for value in args))
        if key not in self._compiled:
            self._compiled[key] = self._build(args)
        return self._compiled[key](*args)


def _shape(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device, value.requires_grad
