"""Program: the one intermediate representation that every pass reads and returns, and its executable specification."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.graph import fake_calls, targets
from memopt.graph.propagation import ProgramError as ProgramError
from memopt.graph.propagation import propagate, run_fake
from memopt.torch_compat import pytree
from memopt.torch_compat.fx_graphs import copy_node as copy_node
from memopt.torch_compat.fx_graphs import lazy_module
from memopt.torch_compat.operators import HigherOrderOperator, OpOverload, schema_of


class InputKind(enum.Enum):
    """What an input of a program is to its model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor that the program itself owns; never passed at a call
    USER = "user"
    TANGENT = "tangent"


class OutputKind(enum.Enum):
    """What an output of a program is to its model."""

    USER = "user"
    MUTATION = "mutation"  # the new value of an input (a buffer, or a user's tensor), copied back by the caller
    GRADIENT = "gradient"


class Phase(enum.Enum):
    """The phase of a training step that a node runs in."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True)
class Input:
    """One placeholder. `target` is the parameter's or buffer's qualified name; None for other kinds.

    A parameter that was gathered for the call is gone after it, as its gradient is after backward: what stays of either
    is a shard of `shard_bytes`.
    """

    name: str
    kind: InputKind
    target: str | None = None
    shard_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One output. `target` names the input whose new value (MUTATION) or gradient (GRADIENT) it is.

    A gradient that is `handed` goes to hooks of its parameter within backward, and is gone then (`memory.hand_over`).
    What forward returns and the caller has `let_go` of is gone when backward begins, unless it is saved for it.
    """

    kind: OutputKind
    target: str | None = None
    handed: bool = False
    let_go: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A graph of functional ATen operations, and what the graph alone cannot say.

    Every node but the output carries `meta["val"]`: a fake tensor, a tuple of them, or a plain number. The order of the
    nodes is the order of execution. In a training program (`training` is true) each call node also carries
    `meta["phase"]`, all forward nodes come before all backward nodes, and a value that crosses from one to the other is
    a saved tensor. `meta["inplace"] = k` on a call node says that its result takes the storage of argument k, an
    annotation that backends may follow (`memopt.passes.inplace` sets it; the graph itself stays functional).

    Attributes:
        graph_module: the graph; `graph_module.graph` must not be edited by a pass: edit a `copy()`.
        inputs: one entry per placeholder, in order.
        outputs: one entry per output, in order; None outputs (no gradient) have an entry too.
        state: real tensors by placeholder name, for PARAMETER, BUFFER and CONSTANT inputs whose values are known.
        training: whether this is a joint forward and backward graph.
        forward_outputs: in a training program, how many leading outputs the forward graph returns.
        baked: names of PARAMETER and BUFFER inputs whose present values a pass read (a folded batch norm): the program
            is right only as long as these tensors keep their values, and whoever runs it must watch them.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    state: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)
    training: bool = False
    forward_outputs: int = 0
    baked: frozenset[str] = frozenset()

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """The graph. Read it freely; edit only the graph of a `copy()`."""
        return self.graph_module.graph

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes, aligned with `inputs`."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output_nodes(self) -> list[Any]:
        """The arguments of the output node, aligned with `outputs`: nodes, None, or plain numbers."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def calls(self) -> list[fx.Node]:
        """The call nodes in order of execution."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def mutated(self) -> frozenset[str]:
        """Names of the inputs that the program writes to."""
        return frozenset(out.target for out in self.outputs if out.kind is OutputKind.MUTATION and out.target)

    def input_of(self, name: str) -> Input:
        """Return the entry of the placeholder called `name`. Raises KeyError when there is none."""
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Input]:
        return {entry.name: entry for entry in reversed(self.inputs)}

    # -- new programs -------------------------------------------------------------------------------------------

    def copy(self) -> Program:
        """Return an equal program whose graph may be edited. Node names and metadata are kept; tensors are shared."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            mapping[node] = copied = copy_node(graph, node, mapping.__getitem__)
            fake_calls.copied(node, copied)
        result = graph.output(fx.map_arg(self.graph.output_node().args[0], lambda n: mapping[n]))
        result.meta = dict(self.graph.output_node().meta)
        return dataclasses.replace(self, graph_module=module_of(self.graph_module, graph))

    def finish(self, **changes: Any) -> Program:
        """Return this (edited) program with `changes` applied and the metadata of new nodes filled in.

        To be called by a pass on the copy that it edited: values are propagated through the whole graph, nodes without
        a phase take the one of their neighbour, and the graph module is recompiled.
        """
        program = dataclasses.replace(self, **changes)
        propagate(program.graph_module, refresh=True)
        if program.training:
            _fill_phases(program.graph)
        program.graph.lint()
        program.graph_module.recompile()
        return program

    # -- the executable specification ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ProgramError, naming the node, unless every rule of the representation holds."""
        try:
            self.graph.lint()
        except RuntimeError as error:
            raise ProgramError(str(error)) from error
        names = [node.name for node in self.placeholders]
        if names != [entry.name for entry in self.inputs]:
            raise ProgramError(f"placeholders {names} do not match inputs {[entry.name for entry in self.inputs]}")
        if len(self.output_nodes) != len(self.outputs):
            raise ProgramError(f"{len(self.output_nodes)} outputs in the graph, {len(self.outputs)} entries")
        for node in self.graph.nodes:
            _check_node(node)
        for entry in self.inputs:
            if entry.kind is InputKind.CONSTANT and entry.name not in self.state:
                raise ProgramError(f"constant {entry.name} has no value in state")
        for name in (*self.state, *self.baked):
            if name not in names:
                raise ProgramError(f"state or baked names {name}, which is no input")
        for output in self.outputs:
            if output.target is not None and output.target not in names:
                raise ProgramError(f"a {output.kind.value} output names {output.target}, which is no input")
        _check_values(self.graph_module)
        if self.training:
            _check_phases(self)

    def run(self, *args: Any) -> list[Any]:
        """Run the program eagerly, freeing each value after its last use, and return the outputs in order.

        Args:
            args: the values of all inputs but CONSTANT ones, in order.

        Raises:
            TypeError: there are more or fewer values than that.
        """
        expected = sum(entry.kind is not InputKind.CONSTANT for entry in self.inputs)
        if len(args) != expected:
            raise TypeError(f"the program takes {expected} arguments, {len(args)} were given")
        remaining = iter(args)
        values = [
            self.state[entry.name] if entry.kind is InputKind.CONSTANT else next(remaining) for entry in self.inputs
        ]
        return list(fx.Interpreter(self.graph_module).run(*values, enable_io_processing=False))


def module_of(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose Python code is written when it is first called or looked at: most never are."""
    return lazy_module(root, graph)


# -- operations -------------------------------------------------------------------------------------------------


def argument(node: fx.Node, name: str) -> Any:
    """What an operator is called with, by the argument's name in its schema: what is given, or else its default.

    None for an operator without an argument of that name.
    """
    for index, entry in enumerate(schema_of(node.target).arguments):
        if entry.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, entry.default_value)
    return None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers: it must not be merged, moved past another draw, or run again."""
    return targets.draws(node.target)


def draws_numbers(node: fx.Node) -> bool:
    """Whether the node draws random numbers in fact: fused attention that drops nothing is so by schema only."""
    return is_random(node) and argument(node, "dropout_p") != 0.0


def is_effectful(node: fx.Node) -> bool:
    """Whether the node does more than compute its value (an assertion, a collective, an unknown operator)."""
    target = node.target
    if target is operator.getitem:
        return False
    return not isinstance(target, OpOverload) or targets.is_impure(node)


def is_view(node: fx.Node) -> bool:
    """Whether the operator's schema says that its result aliases an argument, which is no number: `_conj(1j)`."""
    return targets.gives_views(node.target) and bool(node.all_input_nodes)


def is_any_view(node: fx.Node) -> bool:
    """Whether the result is the argument's memory: a view by its schema, or `_unsafe_view`, which is one by deed."""
    return is_view(node) or node.target is torch.ops.aten._unsafe_view.default


def shows_operand(node: fx.Node) -> bool:
    """Whether a node is a view, or a piece of one that has several results."""
    return is_any_view(node) or (node.target is operator.getitem and shows_operand(node.args[0]))  # type: ignore[arg-type]


def base_of(node: fx.Node) -> fx.Node:
    """What a node shows, through views and their pieces."""
    while shows_operand(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors of the node's value, in order."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # nearly always: no tree to walk
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def source_line(node: fx.Node) -> str:
    """The user's source line that made the node, as `file:line, code`; an empty string when it is not known."""
    return _last_line(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _last_line(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith('File "'):
            parts = lines[index].split(", ")
            code = lines[index + 1] if index + 1 < len(lines) else ""
            path = parts[0][len('File "') : -1]
            return f"{path}:{parts[1].removeprefix('line ')}, {code}".rstrip(", ")
    return ""


# -- rules ----------------------------------------------------------------------------------------------------------


def _check_node(node: fx.Node) -> None:
    if node.op in ("placeholder", "output"):
        if node.op == "placeholder" and "val" not in node.meta:
            raise ProgramError(f"{node.name} has no meta['val']")
        return
    if node.op == "get_attr":
        if all(isinstance(user.target, HigherOrderOperator) for user in node.users):
            return
        raise ProgramError(f"{node.name} reads attribute {node.target}: constants must be inputs of kind CONSTANT")
    if node.op != "call_function":
        raise ProgramError(f"{node.name} is a {node.op} node: only call_function is allowed")
    if "val" not in node.meta:
        raise ProgramError(f"{node.name} has no meta['val']")
    if isinstance(node.target, OpOverload):
        if schema_of(node.target).is_mutable:
            raise ProgramError(f"{node.name} calls {node.target}, which is not functional")
    elif node.target is not operator.getitem and not isinstance(node.target, HigherOrderOperator):
        raise ProgramError(f"{node.name} calls {node.target}, which is no ATen operation")


def _check_values(graph_module: fx.GraphModule) -> None:
    for node, value in run_fake(graph_module).items():
        if node.op != "call_function" or value is node.meta["val"]:
            continue
        found, recorded = pytree.tree_leaves(value), pytree.tree_leaves(node.meta["val"])
        if len(found) != len(recorded):
            raise ProgramError(f"{node.name}: {len(recorded)} values recorded, {len(found)} computed")
        for a, b in zip(found, recorded, strict=True):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or a.stride() != b.stride():
                    raise ProgramError(f"{node.name}: recorded as {describe(b)}, but its operation gives {describe(a)}")
            elif isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
                raise ProgramError(f"{node.name}: recorded as {b!r}, but its operation gives {a!r}")


def describe(value: torch.Tensor) -> str:
    """The tensor's dtype, shape, strides and device in one short phrase."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}, strides {list(value.stride())}, {value.device}"


def _fill_phases(graph: fx.Graph) -> None:
    phase = Phase.FORWARD
    for node in graph.nodes:
        if node.op == "call_function":
            phase = node.meta.setdefault("phase", phase)


def _check_phases(program: Program) -> None:
    backward_started = False
    tangents = {entry.name for entry in program.inputs if entry.kind is InputKind.TANGENT}
    for node in program.calls:
        phase = node.meta.get("phase")
        if phase is Phase.BACKWARD:
            backward_started = True
            continue
        if phase is not Phase.FORWARD:
            raise ProgramError(f"{node.name} has no phase")
        if backward_started:
            raise ProgramError(f"{node.name} belongs to forward but comes after a backward node")
        for argument in node.all_input_nodes:
            if argument.name in tangents or argument.meta.get("phase") is Phase.BACKWARD:
                raise ProgramError(f"{node.name} belongs to forward but reads {argument.name}, a backward value")
    for output, value in zip(program.outputs[: program.forward_outputs], program.output_nodes, strict=False):
        if isinstance(value, fx.Node) and value.meta.get("phase") is Phase.BACKWARD:
            raise ProgramError(f"forward output {value.name} ({output.kind.value}) is computed in backward")
