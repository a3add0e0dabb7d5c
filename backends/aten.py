"""The aten backend: the program itself as straight-line Python that frees each value after its last use.

What was planned is what runs, byte for byte: operations in the order of the graph, in-place overloads where the graph
is annotated, items of multiple results unpacked at once, so that unused ones die with the operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.backends.hand_over import Generate, in_pieces, relayed
from memopt.capture.dynamo import Hooks
from memopt.capture.watched import Watched
from memopt.engine import Engine
from memopt.graph.result_memory import as_run
from memopt.memory.aliasing import owner
from memopt.memory.hand_over import Handing, changed_by_hook
from memopt.step.missing_tangents import filled
from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.dead_draws import dead_draws_kept
from memopt.torch_compat.donated import nothing_donated
from memopt.torch_compat.returned import writable
from memopt.torch_compat.storages import version_of
from memopt.torch_compat.whole_operators import whole_operators

Boxed = Callable[[list[Any]], Sequence[Any]]


class AtenBackend(Engine):
    """Runs a graph operation by operation with PyTorch's own kernels."""

    name = "aten"
    exact = True
    strided = True
    frees_outputs = True

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph: AOTAutograd with the session's partition, each graph emitted as it stands."""

        def operators(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            return writable(emit(module), lambda: [item.place for item in hooks.in_part])

        def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            found = hooks.handed.how
            if found is None:
                return hooks.backward(emit(module))
            count = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            outputs = [item.outputs for item in found.hand_overs]
            return filled(in_pieces(emit_pieces(module, found), count, outputs, hooks.backward))

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            program, rewrite = hooks.inference(module)
            return Watched(program, rewrite, emit)

        lower = aot_autograd(
            fw_compiler=operators, bw_compiler=backward, inference_compiler=inference, partition_fn=hooks.partition
        )
        hooks.handed.may(hooks.session.early)
        # No graph writes over what it is given.
        with dead_draws_kept(), nothing_donated(), whole_operators(example_inputs):
            run = lower(graph_module, example_inputs)
        found = hooks.handed.how
        if found is None or hooks.dry:
            return run
        outputs = [item.outputs for item in found.hand_overs]
        return relayed(run, outputs, found.inputs, hooks.handed.watched(hooks.dropped))


def lower_inference(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    inference: Callable[[fx.GraphModule, Sequence[Any]], Boxed],
) -> Callable[..., Any]:
    """Lower one Dynamo graph with `inference` as the compiler of what is called without gradients.

    A graph that needs gradients all the same, where graphs are only collected, is emitted as it stands.
    """

    def operators(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        return emit(module)

    lower = aot_autograd(fw_compiler=operators, bw_compiler=operators, inference_compiler=inference)
    with dead_draws_kept():
        return lower(graph_module, example_inputs)


def emit(graph_module: fx.GraphModule) -> Boxed:
    """Generate the straight-line function of a graph.

    The function is marked `boxed`: it empties its list of arguments, so that an argument
    can be freed before the function ends. Its source is kept as `source`.
    """
    emitted: Boxed = _emitted(graph_module, None)
    return emitted


def emit_collected(graph_module: fx.GraphModule, hooks: Hooks) -> Boxed:
    """Generate the function of an inference graph that is only collected.

    It is generated first: the session takes the graph over, and has its constants among its inputs then.
    """
    emitted = emit(graph_module)
    hooks.inference(graph_module)
    return emitted


def emit_pieces(graph_module: fx.GraphModule, handing: Handing) -> Generate:
    """Generate the same as a generator, which stops behind each hand-over; its gradients are no results then."""
    emitted: Generate = _emitted(graph_module, handing)
    return emitted


def _emitted(graph_module: fx.GraphModule, handing: Handing | None) -> Any:
    graph = graph_module.graph
    names: dict[fx.Node, str] = {}
    constants: dict[str, Any] = {}

    def literal(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, slice):
            return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
        if isinstance(value, (list, tuple)):
            items = "".join(literal(item) + ", " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {literal(item)}" for key, item in value.items()) + "}"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"_c{len(constants)}"
        constants[name] = value
        return name

    steps = [node for node in graph.nodes if node.op in ("call_function", "get_attr") and not _is_item(node)]
    items = {node: [user for user in node.users if _is_item(user)] for node in steps}
    position = {node: index for index, node in enumerate(steps)}
    last = _last_uses(graph, position)
    pieces = None if handing is None else _Pieces(graph, handing, position)
    lines = ["def run(args):" if pieces is None else "def run(args, give):"]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        names[node] = f"a{index}"
    if placeholders:
        lines.append("    " + "".join(names[node] + ", " for node in placeholders) + "= args")
    lines.append("    args.clear()")
    free_at: dict[int, list[str]] = {}
    for node, index in last.items():
        free_at.setdefault(index, []).append(node)  # type: ignore[arg-type]
    lines += _frees(free_at.get(-1, []), names)
    if pieces is not None:
        constants |= {"changed": changed_by_hook, "version_of": version_of}
        lines += pieces.versions(names)
    for index, node in enumerate(steps):
        names[node] = f"v{index}"
        if pieces is not None:
            lines += pieces.checks(node, index, names)
        lines.append(f"    {names[node]} = {_call(node, literal, constants, graph_module)}")
        for number, item in enumerate(items[node]):  # not by index: the same result may be taken twice
            names[item] = f"{names[node]}_{number}"
            lines.append(f"    {names[item]} = {names[node]}[{item.args[1]}]")
        if items[node]:
            lines.append(f"    del {names[node]}")
        lines += _frees(free_at.get(index, []), names)
        if pieces is not None:
            lines += pieces.given(index, names)
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    if pieces is not None:
        results = [None if number in pieces.outputs else value for number, value in enumerate(results)]
    lines.append(f"    return {literal(results)}")
    source = "\n".join(lines) + "\n"
    namespace: dict[str, Any] = dict(constants)
    exec(compile(source, "<memopt aten program>", "exec"), namespace)
    run: Any = namespace["run"]
    boxed(run)
    run.source = source
    return run


class _Pieces:
    """What a generator has beside the straight-line function: gradients given, and parameters found as they were."""

    def __init__(self, graph: fx.Graph, handing: Handing, position: dict[fx.Node, int]) -> None:
        self._results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        self.outputs = {number for item in handing.hand_overs for number in item.outputs}
        named = {node.name: node for node in graph.nodes}
        self._at: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for number, item in enumerate(handing.hand_overs):
            nodes: list[fx.Node] = [self._results[output] for output in item.outputs]
            nodes += [named[item.after]] if item.after in named else []
            index = max(position[owner(node)] for node in nodes)
            self._at.setdefault(index, []).append((number, item.outputs))
        self._first = min(self._at)
        self._watched = {node: name for node in graph.nodes if (name := handing.shown.get(node.name)) is not None}
        self._watched = {
            node: name
            for node, name in self._watched.items()
            if node.op == "placeholder"
            and any(position[owner(user)] > self._first for user in node.users if user.op == "call_function")
        }

    def versions(self, names: dict[fx.Node, str]) -> list[str]:
        return [f"    {names[node]}_version = version_of({names[node]})" for node in self._watched]

    def checks(self, node: fx.Node, index: int, names: dict[fx.Node, str]) -> list[str]:
        if index <= self._first:
            return []
        read = [(names[item], self._watched[item]) for item in node.all_input_nodes if item in self._watched]
        return [f"    version_of({item}) == {item}_version or changed({name!r})" for item, name in read]

    def given(self, index: int, names: dict[fx.Node, str]) -> list[str]:
        lines = []
        for number, outputs in self._at.get(index, []):
            values = ", ".join(names[self._results[output]] for output in outputs)
            lines += [f"    give({number}, ({values},))", f"    del {values}", "    yield"]
        return lines


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is not operator.getitem  # type: ignore[union-attr]


def _last_uses(graph: fx.Graph, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """The step after which each name is deleted; -1 for arguments that nobody reads; outputs have none."""
    last: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output" or (node in position and any(_is_item(user) for user in node.users)):
            continue  # a multiple result is deleted as soon as it is unpacked
        users = list(node.users)
        if any(user.op == "output" for user in users):
            continue
        born = position.get(owner(node), -1)
        last[node] = max([born, *(position[user] if user in position else position[owner(user)] for user in users)])
    return last


def _frees(nodes: Sequence[Any], names: dict[fx.Node, str]) -> list[str]:
    return ["    del " + ", ".join(names[node] for node in nodes)] if nodes else []


def _call(node: fx.Node, literal: Callable[[Any], str], constants: dict[str, Any], graph_module: fx.GraphModule) -> str:
    if node.op == "get_attr":
        name = f"_attr_{node.name}"
        constants[name] = getattr(graph_module, str(node.target))
        return name
    target: Any = as_run(node.target)
    if "inplace" in node.meta:
        from memopt.memory.over_operands import inplace_overload

        overload = inplace_overload(node.target)
        if overload is None:
            raise RuntimeError(f"{node.name} is annotated in place, but {node.target} has no in-place overload")
        target = overload
    name = "_f_" + "".join(c if c.isalnum() else "_" for c in str(target))
    while constants.get(name, target) is not target:
        name += "_"
    constants[name] = target
    arguments = [literal(argument) for argument in node.args]
    arguments += [f"{key}={literal(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"
