"""Writes that torch's capture loses, refused before anything is run; and those that it lays out anew, mended.

A graph is captured as functions: a write to a view becomes a new value of the tensor that the view shows. Of some views
there is no such value. `unfold` with a step gives zeros for what lies between the windows, and sums where they overlap;
so does an `as_strided` that shows an element twice, and `expand`. `as_strided` of a view is refused by torch itself.
What is written from other places of the same memory (`x[1:] += x[:-1]`, `masked_scatter_`) reads in the model what it
has written, one element after the other, and in a graph what was there before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import name_of, storages_of, value_of, writes
from memopt.capture.export import CaptureError
from memopt.capture.overlap import may_overlap, same_elements, share_elements
from memopt.capture.written_layout import as_tiles, keep_layout, other_layout
from memopt.program import source_line
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.operators import schema_of
from memopt.torch_compat.symbols import is_symbolic, surely
from memopt.torch_compat.transforms import transforms_left

aten = torch.ops.aten

# Parts of the names of what makes such views, in Dynamo's graphs.
_SUSPECTS = ("as_strided", "broadcast", "cartesian", "expand", "meshgrid", "unfold")

# Operators that read an operand once, before they write; and those that read, for an element, not what is at its place.
_OF_ONE_NUMBER = ("fill_", "masked_fill_", "index_fill_")
_ANY_ORDER = ("addbmm", "addmm", "addmv", "addr_", "baddbmm", "index", "masked_scatter", "put_", "scatter")

_INSTEAD = "write to the elements themselves (y[:, [0, 5]] *= 2), or to a copy that takes the tensor's place"


def refuse_lost_writes(graph_module: fx.GraphModule) -> None:
    """Raise CaptureError where a graph of Dynamo's writes to a view that the capture cannot write through.

    The graph is run on fake tensors where it holds such views and writes at all, or writes to what is not contiguous.
    Where the capture would lay out anew what is written to, the graph is edited so that it does not.
    """
    nodes = [node for part in graph_module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    calls = [node for node in nodes if node.op.startswith("call")]
    writing = [node for node in calls if writes(node)]
    suspicious = any(part in name_of(node) for node in calls for part in _SUSPECTS)
    if not writing or not (suspicious or any(map(_may_lose, writing))):
        return
    values = [value_of(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is None:
        return
    run = _Run(graph_module)
    try:
        with transforms_left(), torch.no_grad(), mode:
            given = [_like(value) if isinstance(value, torch.Tensor) else value for value in values]
            with run.watch:
                run.run(*given)
    except Exception:  # what cannot be run so is captured, or refused, by torch
        pass
    if run.watch.lost:
        raise CaptureError(run.watch.lost)
    for node in run.watch.laid_out_anew:
        keep_layout(node)
    for node in run.watch.tiles:
        as_tiles(node)
    if run.watch.laid_out_anew or run.watch.tiles:
        graph_module.recompile()


def _may_lose(node: fx.Node) -> bool:
    """Whether a write may read what it writes, or the capture lay out anew what it writes to."""
    out = node.kwargs.get("out")
    targets, given = ([out], node.args) if out is not None else (node.args[:1], (node.args[1:], node.kwargs))
    written, others = (
        [leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, fx.Node)] for part in (targets, given)
    )
    values = [value for value in map(value_of, written) if isinstance(value, torch.Tensor)]
    if any(value.layout is torch.strided and not value.is_contiguous() for value in values):
        return True
    memory = frozenset[int]().union(*map(storages_of, written))
    return any(not memory.isdisjoint(storages_of(other)) for other in others)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


class _Run(fx.Interpreter):
    """A graph run on fake tensors, whose writes are watched."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.watch = _Watch()

    def run_node(self, n: fx.Node) -> Any:
        self.watch.node = n
        return super().run_node(n)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which tensors are views that cannot be written through, and the refusal of a write to one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.node: fx.Node | None = None
        self.lost = ""  # what is said of the first write to one
        self.laid_out_anew: dict[fx.Node, None] = {}
        self.tiles: dict[fx.Node, None] = {}  # calls of unfold() whose windows neither overlap nor leave gaps
        self._faults: dict[int, str] = {}
        self._views: set[int] = set()
        self._alive: list[Any] = []  # as long as ids are looked up

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        written, read = _operands(schema, args, kwargs)
        for tensor in written:
            if id(tensor) in self._faults:
                self._refuse(f"writes through {self._faults[id(tensor)]}", _INSTEAD)
        if any(_reads_written(func, tensor, other) for tensor in written for other in read):
            self._refuse(f"{_called(func)} reads what it writes", "clone() what it takes the elements of")
        if self.node is not None and schema.is_mutable and other_layout(func, args, kwargs):
            self.laid_out_anew[self.node] = None
        result = func(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and any(item.alias_info is not None for item in schema.returns):
            for view in pytree.tree_leaves(result):
                if isinstance(view, torch.Tensor) and view is not source:
                    self._follow(func, source, view, args)
        return result

    def _follow(self, func: Any, source: torch.Tensor, view: torch.Tensor, args: Sequence[Any]) -> None:
        fault = self._faults.get(id(source)) or _fault(func, source, view, args)
        if func is aten.unfold.default and fault is None and self.node is not None and source.dim():
            self.tiles[self.node] = None
        if func is aten.as_strided.default and id(source) in self._views:
            fault = fault or "as_strided() of a view"
        if fault is not None:
            self._faults[id(view)] = fault
        if func is not aten.detach.default or id(source) in self._views:
            self._views.add(id(view))
        self._alive.append((source, view))

    def _refuse(self, fault: str, instead: str) -> None:
        if self.node is not None:
            where = source_line(self.node) or f"node {self.node.name}"
            self.lost = f"{where}: {fault}, which no graph can hold: {instead}"
            raise RuntimeError(self.lost)


def _operands(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call of an operator writes to, and those that it reads alone."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for place, argument in enumerate(schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found[0 if writes else 1].extend(pytree.tree_leaves(given))
    written, read = ([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in found)
    return written, read


def _reads_written(func: Any, written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an operator may read an element of `other` after it has written it as one of `written`."""
    strided = all(item.layout is torch.strided and not is_symbolic([item]) for item in (written, other))
    if not strided or not share_elements(written, other):
        return False
    name = schema_of(func).name.split("::")[-1]
    return not (name.startswith(_OF_ONE_NUMBER) or (same_elements(written, other) and not name.startswith(_ANY_ORDER)))


def _called(func: Any) -> str:
    name = schema_of(func).name.split("::")[-1]
    return {"copy_": "a copy within one tensor", "index_put_": "an assignment by index"}.get(name, f"{name}()")


def _fault(func: Any, source: torch.Tensor, view: torch.Tensor, args: Sequence[Any]) -> str | None:
    """Why a view cannot be written through, in a few words; None where it can be."""
    if func is aten.unfold.default and source.dim():
        length, (size, step) = source.shape[args[1]], args[2:4]
        if size > step:
            return "unfold() with overlaps"
        tiles = size == step and surely(length % step == 0)
        if not tiles and not surely(length == size):
            return "unfold() with gaps"
    if func is aten.expand.default and any(
        stride == 0 and not surely(size == 1) for size, stride in zip(view.shape, view.stride(), strict=True)
    ):
        return "expand(), which shows an element many times"
    if func is aten.as_strided.default and may_overlap(view):
        return "as_strided() with overlaps"
    return None
