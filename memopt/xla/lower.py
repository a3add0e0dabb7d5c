"""A graph of ATen operators as a JAX function of flat arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from memopt.errors import first_line
from memopt.program import Program, is_random, tensors_of
from memopt.torch_compat.operators import OpOverload, schema_of
from memopt.xla.legalize import legalize, torchax_lowering, where
from memopt.xla.table import LOWERINGS, WITH_CONTEXT, Context, LowerError, jax_dtype, random_key

aten = torch.ops.aten

# Where a node's operands with sizes that vary are kept: a graph itself holds numbers only.
VARIED = "memopt_varied"
_OPERANDS = ("number", "Optional[number]", "Tensor", "Optional[Tensor]")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FILLS = (
    aten.full, aten.full_like, aten.new_full, aten.fill, aten.masked_fill, aten.scalar_tensor, aten.constant_pad_nd,
    aten.clamp,
)  # fmt: skip
_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A graph as a JAX function.

    Attributes:
        function: takes one array per placeholder of the graph, in order (None for those that are no tensors), and
            behind them, where `random` is set, a key: uint32[2]. Returns one array per output, in order; an output that
            is no tensor is given back as it is.
        module: the graph that is run, every operator of which has a lowering.
        random: whether the graph draws random numbers.
        x64: whether it holds 64-bit numbers: trace and call it inside `precision(x64)`.
    """

    function: Callable[..., list[Any]]
    module: fx.GraphModule
    random: bool
    x64: bool

    def arguments(self) -> list[jax.ShapeDtypeStruct | None]:
        """Shape and dtype of each argument of `function`, the key included."""
        shapes = [_struct(node.meta.get("val")) for node in self.module.graph.find_nodes(op="placeholder")]
        return [*shapes, *([jax.ShapeDtypeStruct((2,), jnp.uint32)] if self.random else [])]


def lower(program: Program | fx.GraphModule, *, platform: str | None = None, parts: int = 1) -> Lowered:
    """Lower a program, or one half of a training step.

    Every value has the shape and the dtype that PyTorch gives it; half types are computed in float32 where PyTorch's
    kernels do so, and float32 products are full float32. 64-bit integers and floats stay 64 bits wide. Mutated inputs
    are among the results.

    Args:
        program: its graph's placeholders become the arguments, constants included: weights are never part of the code.
        platform: "cpu" or "cuda" where the function will run on one only; None: it must run on both.
        parts: how many parts of the batch a convolution may be run in; more hold less at a time.

    Raises:
        LowerError: an operator has no lowering; one line names it and its source line.
    """
    given = program.graph_module if isinstance(program, Program) else program
    module = legalize(given)
    _check_inputs(module)
    for node in given.graph.nodes:
        _check_fill(node)
    random = any(_draws(node) for node in module.graph.nodes)
    x64 = any(_is_wide(number) for node in module.graph.nodes for number in (*_read(node), *_numbers(node).values()))
    walker = _Walker(module, platform, random, parts)
    return Lowered(walker.run, module, random, x64)


@contextlib.contextmanager
def precision(x64: bool) -> Iterator[None]:
    """Inside, JAX keeps 64-bit numbers if `x64` is set, and only then."""
    with jax.enable_x64(x64):
        yield


def _read(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the node that something reads: of many results only the items that are taken."""
    several = isinstance(node.meta.get("val"), (tuple, list))
    return [] if several or not node.users else tensors_of(node)


def _is_wide(value: Any) -> bool:
    """Whether it takes 64 bits: a tensor by its dtype, a number by its size."""
    if isinstance(value, torch.Tensor):
        return value.dtype in _WIDE
    return isinstance(value, int) and not -(1 << 31) <= value < 1 << 31


def _numbers(node: fx.Node) -> dict[str, Any]:
    """The numbers among a node's operands by name: those that it computes with, not sizes and positions."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return {}
    arguments = schema_of(node.target).arguments
    given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
    operands = {argument.name for argument in arguments if str(argument.type) in _OPERANDS}
    return {name: value for name, value in given.items() if name in operands and isinstance(value, (int, float))}


def _check_fill(node: fx.Node) -> None:
    """Refuse what PyTorch refuses: a number put into integers that cannot hold it."""
    value = node.meta.get("val")
    if node.op != "call_function" or getattr(node.target, "overloadpacket", None) not in _FILLS:
        return
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        return
    limits = torch.iinfo(value.dtype)
    for number in _numbers(node).values():
        if not limits.min <= number <= limits.max:
            raise LowerError(f"{where(node)}: {number} does not fit in {str(value.dtype).removeprefix('torch.')}")


def _draws(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_random(node):
        return False
    schema = schema_of(node.target)
    for index, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def _check_inputs(module: fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if value is not None and not isinstance(value, torch.Tensor) and node.users:
            raise LowerError(f"input {node.name} is no tensor: an XLA executable takes tensors only")


def _struct(value: Any) -> jax.ShapeDtypeStruct | None:
    if not isinstance(value, torch.Tensor):
        return None
    return jax.ShapeDtypeStruct(tuple(value.shape), jax_dtype(value.dtype))


class _Walker:
    """Runs the graph node by node on traced arrays."""

    def __init__(self, module: fx.GraphModule, platform: str | None, random: bool, parts: int) -> None:
        self.module, self.platform, self.random = module, platform, random
        self.parts = parts
        nodes = list(module.graph.nodes)
        self.last = {used: node for node in nodes for used in node.all_input_nodes}
        self.numbers = {node: number for number, node in enumerate(node for node in nodes if _draws(node))}

    def run(self, *arguments: Any) -> list[Any]:
        """The function itself."""
        key = random_key(arguments[-1]) if self.random else None
        values: dict[fx.Node, Any] = {}
        given = iter(arguments)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = _constant(self.module, node)
            elif node.op == "output":
                return [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in node.args[0]]
            else:
                values[node] = self._call(node, values, key)
                for used in node.all_input_nodes:
                    if self.last[used] is node:
                        del values[used]
        raise AssertionError("a graph has an output")

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], key: Any) -> Any:
        args, kwargs = fx.map_arg(node.meta.get(VARIED, (node.args, node.kwargs)), lambda n: values[n])
        if node.target is operator.getitem:
            found = args[0][args[1]]
            if found is None and node.meta.get("val") is not None:
                raise LowerError(f"{where(node.args[0])}: its result {args[1]} is not computed under XLA")  # type: ignore[arg-type]
            return found
        if node.target in WITH_CONTEXT:
            draw = lambda: jax.random.fold_in(key, self.numbers[node])  # noqa: E731
            args = (Context(node, self.platform, draw, self.parts), *args)
        function = LOWERINGS.get(node.target) or torchax_lowering(node.target)
        assert function is not None
        try:
            return _as_recorded(function(*args, **kwargs), node.meta["val"], node)
        except LowerError as error:
            raise error if str(node.target) in str(error) else LowerError(f"{where(node)}: {error}") from None
        except Exception as error:
            raise LowerError(f"{where(node)} cannot be lowered: {first_line(error)}") from error


def _constant(module: fx.GraphModule, node: fx.Node) -> Any:
    value = getattr(module, str(node.target))
    if not isinstance(value, torch.Tensor):
        raise LowerError(f"{node.name} is a graph inside of a graph, which has no form under XLA")
    return jnp.asarray(value.detach().cpu().numpy())


def _as_recorded(found: Any, recorded: Any, node: fx.Node) -> Any:
    """The result in the dtype that PyTorch's own has. Raises LowerError where its shape is another."""
    if isinstance(recorded, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(recorded):
            raise LowerError(f"{where(node)}: another number of results than PyTorch's")
        return tuple(_as_recorded(a, b, node) for a, b in zip(found, recorded, strict=True))
    if found is None or not isinstance(recorded, torch.Tensor):
        return found
    found = jnp.asarray(found)
    if not _same_shape(found.shape, recorded.shape):
        raise LowerError(f"{where(node)}: its result is {list(found.shape)}, PyTorch's is {list(recorded.shape)}")
    return found.astype(jax.dtypes.canonicalize_dtype(jax_dtype(recorded.dtype)))


def _same_shape(found: Sequence[Any], recorded: Sequence[int]) -> bool:
    """Whether two shapes are equal; a size that varies equals any."""
    return len(found) == len(recorded) and all(
        not isinstance(a, int) or a == b for a, b in zip(found, recorded, strict=True)
    )
