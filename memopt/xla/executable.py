"""A graph compiled by XLA for one device: run on PyTorch's tensors, its memory known before it runs."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

# XLA would take three quarters of the card's memory at its first use, beside PyTorch's allocator.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from memopt.torch_compat.saved_tensors import hooks_in_force
from memopt.xla.exchange import Exporter, Importer, carried
from memopt.xla.layout import Order, laid_out, order_of
from memopt.xla.lower import Lowered, lower, precision
from memopt.xla.pieces import Piece, cut, value_bytes
from memopt.xla.together import Together

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)

# XLA's CPU compiler orders operations for parallelism unless it is told to keep memory low.
_OPTIONS = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}


@dataclasses.dataclass(frozen=True)
class Memory:
    """What an executable takes while it runs, in bytes, by the compiler's own analysis for its device.

    Attributes:
        arguments: of all its arguments.
        outputs: of its results that are in memory of their own.
        temporaries: of everything between.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def peak(self) -> int:
        """All of it together."""
        return self.arguments + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class _Compiled:
    piece: Piece
    lowered: Lowered
    run: Any
    writes: Sequence[str]
    memory: Memory


class Executable:
    """One graph: cut in pieces if it is to free arguments on its way, each piece compiled ahead of its first run."""

    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        *,
        size: int = 0,
        parts: int = 1,
        stays: Collection[str] = (),
        own: Collection[str] = (),
        exact: Sequence[bool] | None = None,
        together: Collection[str] = (),
    ) -> None:
        """Compile.

        Args:
            module: a functional ATen graph; tensors among its attributes become arguments that are kept here.
            device: where its arguments are.
            size: operators in a piece; 0: one piece.
            parts: how many parts of the batch a convolution may be run in.
            stays: names of the arguments that are the same tensors at every call, parameters and buffers: they are
                imported once.
            own: names of the arguments that are another executable's results, laid out as it liked.
            exact: per result, whether it is a tensor laid out as PyTorch's own; None: all are. Others are for another
                executable only, and are given to it as arrays, by tensors that stand for them.
            together: names of the results that may share memory with one another, where there is one piece.

        Raises:
            LowerError: an operator has no lowering.
        """
        self.module, self.device = module, device
        self.platform = "cpu" if device.type == "cpu" else "cuda"
        module, held = attributes_to_inputs(module)
        _leave_unread(module)
        self._held = list(held.values())
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        exact = [True] * len(self._results) if exact is None else exact
        self._like: dict[fx.Node, torch.Tensor | None] = {}  # what results are laid out as; None: as XLA likes
        for node, wanted in zip(self._results, exact, strict=True):
            if isinstance(node, fx.Node):
                self._like[node] = node.meta["val"] if wanted else self._like.get(node)
        images = any(node.target in _CONVOLUTIONS for node in module.graph.nodes)
        made = [node for node in self._like if node not in self._inputs]
        free = set() if size else {*own, *(node.name for node in made if self._like[node] is None)}
        self._orders = {
            node.name: order_of(node.meta.get("val"), free=node.name in free, images=images)
            for node in (*self._inputs, *made)
        }
        self._together: Together | None = None
        gathered = [node.name for node in made if node.name in together and self._like[node] is not None]
        if gathered and not size:
            values = {node.name: node.meta.get("val") for node in made}
            self._together = Together(values, self._orders, gathered)
        self._compiled: list[_Compiled] = []
        written: set[str] = set()
        for piece in cut(module, size):
            self._compiled.append(self._compile(piece, parts, written))
            written.update(piece.writes)
        self.random = any(one.lowered.random for one in self._compiled)
        read = {name for one in self._compiled for name in one.piece.reads}
        names = [node.name for node in self._inputs]
        # What nothing reads, such as a weight that was folded into another, is not imported.
        self._read = [(index, name) for index, name in enumerate(names) if name in read]
        self._passed = {node: names.index(node.name) for node in self._results if node in self._inputs}
        first = self._compiled[0].piece.reads if self._compiled else ()
        self._import = Importer({*stays, *held}, first, self._orders)

    def _compile(self, piece: Piece, parts: int, made: Collection[str]) -> _Compiled:
        """Compile one piece; of what it frees, results may take the place of what earlier pieces `made`."""
        lowered = lower(piece.module, platform=self.platform, parts=parts)
        device = jax.devices(self.platform)[self.device.index or 0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        with precision(lowered.x64):
            function, shapes = laid_out(
                lowered, [self._orders.get(name) for name in piece.reads], [self._orders.get(n) for n in piece.writes]
            )
            arguments = [
                jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding) if one is not None else None
                for one in shapes
            ]
            donated = _donated(piece, made, self._orders)
            writes: Sequence[str] = piece.writes
            if self._together is not None:
                function = self._together.gathered(function, writes)
                writes = [*self._together.apart, *self._together.names]
            traced = jax.jit(function, keep_unused=True, donate_argnums=donated).lower(*arguments)
            run = traced.compile(compiler_options=_OPTIONS.get(self.platform))
        found = run.memory_analysis()
        memory = Memory(
            found.argument_size_in_bytes,
            found.output_size_in_bytes - found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )
        return _Compiled(piece, lowered, run, writes, memory)

    @property
    def memories(self) -> list[Memory]:
        """What each piece takes, in order."""
        return [one.memory for one in self._compiled]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on a list of tensors, which is emptied; what is no tensor is passed over."""
        given = [*args, *self._held]
        args.clear()
        passed = {node: given[index] for node, index in self._passed.items()}
        with precision(True):
            values = self._import({name: given[index] for index, name in self._read})
            given.clear()
            seed = _seed() if self.random else None
            for number, one in enumerate(self._compiled):
                taken = [values[name] for name in one.piece.reads]
                if one.lowered.random:
                    taken.append(jax.device_put(_key(seed, number), jax.devices(self.platform)[self.device.index or 0]))
                found = one.run(*taken)
                del taken
                values.update(zip(one.writes, found, strict=True))
                for name in one.piece.frees:
                    del values[name]
            joined = [values[name] for name in self._together.names] if self._together else []
            arrays = {node: values[node.name] for node in self._like if node.name in values and node not in passed}
            values.clear()
            if self.platform == "cpu":  # PyTorch may write to what XLA still reads
                jax.block_until_ready([*arrays.values(), *joined])
            export = Exporter(self.device)
            parts = self._together.parted([export(array) for array in joined]) if self._together else {}
            shown = hooks_in_force()
            made = {node: parts[node.name] for node in self._like if node.name in parts}
            for node, like in self._like.items():
                if node in arrays:
                    array = arrays.pop(node)
                    plain = like is not None or shown
                    made[node] = export(array, like, self._orders.get(node.name)) if plain else carried(array)
                    del array
        made.update(passed)
        return [made[node] if isinstance(node, fx.Node) else node for node in self._results]

    def usage(self, resident: Collection[str]) -> tuple[int, int]:
        """The most bytes above what is resident while it runs, and those of its results.

        Args:
            resident: names of the arguments that are somebody else's, and stay.
        """
        live = {node.name: value_bytes(node) for node in self._inputs if node.name not in resident}
        peak = sum(live.values())
        for one in self._compiled:
            peak = max(peak, sum(live.values()) + one.memory.outputs + one.memory.temporaries)
            results = one.piece.module.graph.output_node().args[0]
            live.update(zip(one.piece.writes, map(value_bytes, results), strict=True))  # type: ignore[arg-type]
            for name in one.piece.frees:
                live.pop(name, None)
        kept = dict.fromkeys(node for node in self._results if isinstance(node, fx.Node) and node.name not in resident)
        return peak, sum(map(value_bytes, kept))

    @property
    def argument_names(self) -> set[str]:
        """Names of its arguments, those that it keeps itself included."""
        return {node.name for node in self._inputs}

    @property
    def result_bytes(self) -> list[int]:
        """Bytes of each result; 0 for what is no tensor."""
        return [value_bytes(node) if isinstance(node, fx.Node) else 0 for node in self._results]

    def bytes_of(self, names: Collection[str]) -> int:
        """Bytes of the results of these names."""
        found = {node.name: value_bytes(node) for node in self._results if isinstance(node, fx.Node)}
        return sum(size for name, size in found.items() if name in names)


def _donated(piece: Piece, made: Collection[str], orders: Mapping[str, Order]) -> tuple[int, ...]:
    """The arguments that may become results: nobody else's, not read again, each with a result of its own form."""
    results: Any = piece.module.graph.output_node().args[0]
    forms = collections.Counter(_form(node, orders.get(name)) for node, name in zip(results, piece.writes, strict=True))
    donated = []
    placeholders = piece.module.graph.find_nodes(op="placeholder")
    for index, (name, node) in enumerate(zip(piece.reads, placeholders, strict=True)):
        form = _form(node, orders.get(name))
        if name in piece.frees and name in made and forms[form]:
            forms[form] -= 1
            donated.append(index)
    return tuple(donated)


def _form(node: fx.Node, order: Order) -> tuple[torch.Size, torch.dtype]:
    value: torch.Tensor = node.meta["val"]
    return (value.permute(order) if order else value).shape, value.dtype


def _seed() -> torch.Tensor:
    """A key for this call, from PyTorch's own generator: `torch.manual_seed` makes it the same again."""
    return torch.randint(0, 1 << 32, (2,), dtype=torch.int64)


def _key(seed: Any, number: int) -> Any:
    first, second = (int(part) for part in seed)
    return jnp.asarray([first, (second + number * 0x9E3779B9) % (1 << 32)], jnp.uint32)


def _leave_unread(module: fx.GraphModule) -> None:
    """Take away operands that lowerings do not look at, so that nobody hands them over.

    The gradient of a normalization by the batch's own statistics has no use for the running ones.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        gradient, x, weight, _, _, mean, rstd, train, *rest = node.args
        if train:
            node.args = (gradient, x, weight, None, None, mean, rstd, train, *rest)


def attributes_to_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """A graph whose tensor attributes are placeholders behind the others, and their values in order."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    held: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor):
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta = dict(node.meta)
            held[node.name] = value
    for node in module.graph.nodes:
        if node not in mapping:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = dict(node.meta)
    return fx.GraphModule(module, graph), held
