"""A training program from AOTAutograd's joint graph, and back to forward and backward graph that AOTAutograd wants."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart, forget
from memopt.graph.propagation import fake_mode
from memopt.graph.result_memory import write_out_reductions
from memopt.graph.rewrite import ancestors, descendants, storages
from memopt.graph.weights import Value, Weights, joined
from memopt.memory.aliasing import owner
from memopt.program import (
    Input,
    InputKind,
    Output,
    OutputKind,
    Phase,
    Program,
    copy_node,
    is_any_view,
    is_effectful,
    is_random,
    module_of,
)
from memopt.step.own_copies import RECOMPUTED, is_copy_of_input
from memopt.torch_compat import roles

# The forward graph of a joint graph, and the backward graph.
Partitioned = tuple[fx.GraphModule, fx.GraphModule]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What an input of a captured graph is: its role, its qualified name and where its real value is, where known.

    Of a parameter that is gathered for the call, the bytes of the shard that stays, too.
    """

    kind: InputKind
    target: str | None
    value: Value | None
    shard_bytes: int | None = None


def from_joint(joint: fx.GraphModule, forward_outputs: int, origins: Sequence[Origin]) -> Program:
    """Turn a joint forward and backward graph into a training program.

    Inputs that the graph updates itself at its end (`copy_`, as Inductor asks of AOTAutograd) become MUTATION outputs
    behind the other outputs of forward; `mutations_in_place` is the way back.

    Forward is what the forward outputs need, and every random or effectful node, and every copy of an input, that
    autograd traced before the backward; all else is backward, in the order in which it was traced.

    Args:
        joint: the graph as a partitioner receives it.
        forward_outputs: how many leading outputs belong to forward.
        origins: one entry per input of the graph that AOTAutograd was given.
    """
    updates = {node: None for node in joint.graph.nodes if _is_update(node)}
    outputs = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    outputs[forward_outputs:forward_outputs] = [node.args[1] for node in updates]
    forward_outputs += len(updates)
    forward = ancestors([value for value in outputs[:forward_outputs] if isinstance(value, fx.Node)])
    late = descendants(node for node in joint.graph.nodes if is_tangent(node))
    early = []
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in forward and node not in late and node not in updates:
            traced_in_forward = node.meta.get("partitioner_tag") != "is_backward"
            if traced_in_forward and (is_random(node) or is_effectful(node) or is_copy_of_input(node)):
                early.append(node)
    forward |= ancestors(early)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for wanted in (True, False):
        for node in joint.graph.nodes:
            if node.op == "output" or node in mapping or node in updates:
                continue
            is_forward = node.op in ("placeholder", "get_attr") or owner(node) in forward
            if is_forward is not wanted:
                continue
            mapping[node] = copied = copy_node(graph, node, mapping.__getitem__)
            if node.op == "call_function":
                copied.meta["phase"] = Phase.FORWARD if is_forward else Phase.BACKWARD
                if not is_forward and node not in late and node.meta.get("partitioner_tag") == "is_forward":
                    copied.meta[RECOMPUTED] = True  # autograd saved what it is
    _keep_overwritten(graph, [mapping[node.args[0]] for node in updates])
    _lay_out_dropout_gradients(graph)
    result = graph.output(fx.map_arg(outputs, lambda n: mapping[n]))
    result.meta = dict(joint.graph.output_node().meta)
    if "desc" in result.meta:
        descs = list(result.meta["desc"])
        place = forward_outputs - len(updates)
        descs[place:place] = [roles.updating(node.args[0].meta["desc"]) for node in updates]
        result.meta["desc"] = descs
    module = module_of(joint, graph)
    return program_of_graph(module, origins, training=True, forward_outputs=forward_outputs)


def _keep_overwritten(graph: fx.Graph, written: Sequence[fx.Node]) -> None:
    """Have backward read copies of what inputs were, where it reads inputs that forward writes to.

    They stand for the user's own copies, which Inductor leaves out of a joint graph (pytorch#198131).

    Args:
        graph: a joint graph without its end, edited.
        written: the inputs that forward writes to.
    """
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in shown_by(written):
        late = [user for user in node.users if user.meta["phase"] is Phase.BACKWARD]
        if first is None or not late:
            continue
        with graph.inserting_before(first if node.op == "placeholder" else node.next):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = {"val": apart(node.meta["val"]), "phase": Phase.FORWARD}
        for user in late:
            user.replace_input_with(node, copied)


def _lay_out_dropout_gradients(graph: fx.Graph) -> None:
    """Have a dropout's gradient be contiguous on a CPU, as it was traced: there it lies as what it is computed from."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout_backward.default):
        gradient: Any = node.args[0]
        value = gradient.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.is_contiguous():
            continue
        with graph.inserting_before(node):
            copied = graph.call_function(
                torch.ops.aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format}
            )
        copied.meta["phase"] = node.meta["phase"]
        node.replace_input_with(gradient, copied)


def shown_by(inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Inputs, and what shows their memory in forward: views, and pieces of such."""
    found = list(inputs)
    for node in found:
        found += [user for user in node.users if user.meta.get("phase") is not Phase.BACKWARD and _shows(user)]
    return found


def _shows(node: fx.Node) -> bool:
    return is_any_view(node) or node.target is operator.getitem


def program_of_graph(
    module: fx.GraphModule, origins: Sequence[Origin], *, training: bool = False, forward_outputs: int = 0
) -> Program:
    """Name the roles in a graph that AOTAutograd made (the module is taken over) and return it as a program."""
    write_out_reductions(module.graph)
    inputs: list[Input] = []
    state: dict[str, Value] = {}
    held: set[int] = set()  # storages of the inputs so far
    for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
        if "val" not in node.meta and not node.users:
            node.meta["val"] = None  # a plain argument that AOTAutograd took for a constant
        origin = _origin(node, origins)
        if origin.kind is InputKind.TANGENT and not held.isdisjoint(storages(node)):
            node.meta["val"] = apart(node.meta["val"])  # that of a result which is a view was traced as that view
        held.update(storages(node))
        inputs.append(Input(node.name, origin.kind, origin.target, origin.shard_bytes))
        if origin.value is not None and origin.kind is not InputKind.USER:
            state[node.name] = origin.value
    by_position = placeholder_by_position(module)
    output_node = module.graph.output_node()
    outputs_args = list(output_node.args[0])  # type: ignore[arg-type]
    outputs = [_output_role(desc, by_position) for desc in output_node.meta.get("desc") or [None] * len(outputs_args)]
    program = Program(module, tuple(inputs), tuple(outputs), Weights(state), training, forward_outputs)
    return _constants_to_inputs(program).finish()


def split(program: Program, extract: Callable[..., Partitioned]) -> Any:
    """Cut a training program where forward ends; what crosses is saved.

    Args:
        program: a training program.
        extract: torch's `_extract_fwd_bwd_modules`, bound to the arguments that this version of torch wants.

    Returns:
        The forward and the backward graph module.
    """
    module = constants_to_attributes(program)
    outputs: Any = module.graph.output_node().args[0]
    returned = set(outputs[program.forward_outputs :])
    saved = [
        node
        for node in module.graph.nodes
        if node.op in ("call_function", "placeholder")
        and node.meta.get("phase") is not Phase.BACKWARD
        and not is_tangent(node)
        and (node in returned or any(user.meta.get("phase") is Phase.BACKWARD for user in node.users))
    ]
    return extract(module, saved)


def erase_dead_draws(backward: fx.GraphModule) -> None:
    """Erase from a backward graph what draws in vain in forward, where it has been drawn by then."""
    while True:  # what was drawn only for another draw is drawn in vain once that is erased
        dead = [
            node
            for node in reversed(backward.graph.nodes)
            if is_random(node) and not node.users and node.meta.get("phase") is Phase.FORWARD
        ]
        if not dead:
            return
        for node in dead:
            backward.graph.erase_node(node)
        backward.graph.eliminate_dead_code()
        backward.recompile()


def mutations_in_place(forward: fx.GraphModule, program: Program, forward_outputs: int) -> None:
    """Let the forward graph update its inputs itself, as the joint graph did, in place of the outputs that say so.

    An input is written to as soon as nothing reads what it was: the new value need not wait for that in memory of its
    own, and its kernel may write it there. All new values are made of what inputs were before: one that is another
    input, or a view, is copied, since Inductor computes a view while it writes (and leaves out no copy but a clone).

    Args:
        forward: the forward graph, edited.
        program: the training program that it was cut from.
        forward_outputs: how many outputs AOTAutograd expects of forward; those beyond became outputs in `from_joint`.
    """
    added = program.outputs[forward_outputs : program.forward_outputs]
    if not added:
        return
    node = forward.graph.output_node()
    outputs = list(node.args[0])  # type: ignore[arg-type]
    placeholders = {item.name: item for item in forward.graph.nodes if item.op == "placeholder"}
    last = next(item for item in reversed(forward.graph.nodes) if item.op == "placeholder")
    written: dict[fx.Node, fx.Node] = {}
    for output, value in zip(added, outputs[forward_outputs:], strict=False):
        target = placeholders[str(output.target)]
        if value.op == "placeholder" or is_any_view(value):
            with forward.graph.inserting_after(last if value.op == "placeholder" else value):
                copied = forward.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (value,))
            copied.meta["val"] = apart(value.meta["val"])
            value = copied
        written[target] = value
    place = {item: index for index, item in enumerate(forward.graph.nodes)}
    for target, value in written.items():
        readers = {user for shown in shown_by([target]) for user in shown.users} - {node}
        after = max(last, value, *readers, key=place.__getitem__)
        with forward.graph.inserting_after(after):
            update = forward.graph.call_function(torch.ops.aten.copy_.default, (target, value))
        update.meta["val"] = target.meta["val"]
        place[update] = place[after]
    drop_outputs(forward, forward_outputs, program.forward_outputs)


def drop_outputs(module: fx.GraphModule, start: int, stop: int) -> None:
    """Let a graph return no more what it returns at these positions; what they are for goes with them."""
    node = module.graph.output_node()
    outputs = list(node.args[0])  # type: ignore[arg-type]
    del outputs[start:stop]
    node.args = (tuple(outputs),)
    described = list(node.meta.get("desc") or ())
    if described:  # a copy of the graph has the same list
        del described[start:stop]
        node.meta["desc"] = described
    module.recompile()


def constants_to_attributes(program: Program) -> fx.GraphModule:
    """A copy of the graph with CONSTANT inputs as attributes: its placeholders are the arguments of a call."""
    module = program.copy().graph_module
    forget(module.graph)
    constants = {entry.name for entry in program.inputs if entry.kind is InputKind.CONSTANT}
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and node.name in constants:
            attribute = f"_memopt_{node.name}"
            module.register_buffer(attribute, program.state[node.name], persistent=False)
            with module.graph.inserting_before(node):
                replacement = module.graph.get_attr(attribute)
            replacement.meta = dict(node.meta)
            if program.training:
                replacement.meta.pop("phase", None)
            node.replace_all_uses_with(replacement)
            module.graph.erase_node(node)
    module.recompile()
    return module


def _constants_to_inputs(program: Program) -> Program:
    """Turn tensor attributes of the graph into CONSTANT inputs."""
    module, inputs, state = program.graph_module, list(program.inputs), dict[str, torch.Tensor]()
    mode = fake_mode(module)
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue
        anchor = next(iter(module.graph.nodes))
        with module.graph.inserting_before(anchor):
            placeholder = module.graph.placeholder(node.name + "_constant")
        placeholder.meta = {**node.meta, "val": mode.from_tensor(value.detach(), static_shapes=True)}
        node.replace_all_uses_with(placeholder)
        module.graph.erase_node(node)
        inputs.insert(0, Input(placeholder.name, InputKind.CONSTANT))
        state[placeholder.name] = value.detach()
    return dataclasses.replace(program, inputs=tuple(inputs), state=joined(program.state, state))


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is an input of backward: the gradient of an output."""
    return node.op == "placeholder" and (
        roles.is_tangent(node.meta.get("desc")) or str(node.target).startswith("tangents")
    )


def _is_update(node: fx.Node) -> bool:
    """Whether the node writes the final value of an input into it."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return False
    target = node.args[0]
    return isinstance(target, fx.Node) and target.op == "placeholder"


def _origin(node: fx.Node, origins: Sequence[Origin]) -> Origin:
    if is_tangent(node):
        return Origin(InputKind.TANGENT, None, None)
    position = roles.position_given(node.meta.get("desc"))
    if position is not None and position < len(origins):
        return origins[position]
    return Origin(InputKind.USER, None, None)


def positions(module: fx.GraphModule) -> dict[str, int]:
    """By name of a placeholder, which input of the captured graph it is."""
    return {name: index for index, name in placeholder_by_position(module).items()}


def placeholder_by_position(module: fx.GraphModule) -> dict[int, str]:
    """The names of a graph's placeholders by which input they are of the graph that AOTAutograd was given."""
    return {
        position: node.name
        for node in module.graph.nodes
        if node.op == "placeholder" and (position := roles.position_given(node.meta.get("desc"))) is not None
    }


def _output_role(desc: Any, placeholders: dict[int, str]) -> Output:
    if (updated := roles.updated_by(desc)) is not None:
        return Output(OutputKind.MUTATION, _name_of(updated, placeholders))
    if (source := roles.gradient_of(desc)) is not None:
        return Output(OutputKind.GRADIENT, _name_of(source, placeholders))
    return Output(OutputKind.USER)


def _name_of(desc: Any, placeholders: dict[int, str]) -> str | None:
    position = roles.position_given(desc)
    return None if position is None else placeholders.get(position)
