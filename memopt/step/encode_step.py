"""A training program as plain numbers for the solvers, and a solver's schedule as a training program again."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import fx

from memopt.graph import fake_calls
from memopt.memory.aliasing import Aliasing, of_finished, owner
from memopt.memory.hand_over import hand_overs
from memopt.memory.over_operands import may_lie_in
from memopt.memory.timeline import held_tangents, tangents_of
from memopt.program import InputKind, Phase, Program, copy_node, is_effectful, is_random, module_of
from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule
from memopt.step.own_copies import RECOMPUTED, copy_small_inputs, is_copy_of_input
from memopt.torch_compat.autograd_nodes import gradients_are_held
from memopt.torch_compat.operators import OpOverload

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_BATCH_NORM_AGAIN = torch.ops.aten._native_batch_norm_legit.no_stats
# A batch norm that runs again gives its result and the batch's statistics, but no new running statistics.
OTHER_FORM_RESULTS = 3
# What came of schedules of a program: one that was applied to be counted is not applied again to be proved.
_APPLIED: WeakKeyDictionary[Program, dict[Schedule, Program]] = WeakKeyDictionary()


class Cost(Protocol):
    """What one run of an operation takes."""

    @property
    def seconds(self) -> float:
        """Time of one run."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes needed only while it runs."""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A program's StepProblem, and what its numbers stand for.

    Attributes:
        problem: the numbers.
        operations: per operation of the problem, its node. Views, and values that are annotated as fused, are no
            operations: they are rebuilt where needed. A placeholder stands for the arrival of the tangents.
        aliasing: the program's storages, with the problem's numbering.
        kernels: per operation, whether a kernel is generated for it, which writes over what it reads last.
        over: storages of backward's results, each with that of an operand which it may lie in: nothing else reads it.
    """

    problem: StepProblem
    operations: tuple[fx.Node, ...]
    aliasing: Aliasing
    kernels: tuple[bool, ...]
    over: tuple[tuple[int, int], ...] = ()


def lower(program: Program, costs: Mapping[str, Cost]) -> Lowering:
    """Describe a training program's step in plain numbers.

    Args:
        program: a training program; what is annotated as `inplace`, and what it is written over, never runs again.
        costs: seconds and workspace by node name; nodes that are missing cost nothing.
    """
    aliasing = of_finished(program)
    operations = [node for node in program.calls if _is_operation(node, aliasing)]
    mutated = program.mutated
    fragile = {index for node in program.placeholders if node.name in mutated for index in aliasing.of[node]}
    tangents = tangents_of(program)
    taken = {index for node in operations if "inplace" in node.meta for index in aliasing.of[node]}
    # What is handed over is so once, when it was made first.
    given = {number for item in hand_overs(program, aliasing) for number in item.outputs}
    taken |= {index for number in given for index in aliasing.of[program.output_nodes[number]]}
    cut = sum(node.meta["phase"] is Phase.FORWARD for node in operations)
    if tangents:
        operations.insert(cut, tangents[0])  # stands for the arrival of all tangents where backward starts
    let_go = {number for number, output in enumerate(program.outputs) if output.let_go}
    if let_go:
        operations.insert(cut, program.graph.output_node())  # stands for forward's end: until then they are there
        cut += 1
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    recomputable: list[bool] = []
    for node in operations:
        if node.op == "placeholder":
            reads.append(())
            writes.append(tuple(dict.fromkeys(index for tangent in tangents for index in aliasing.of[tangent])))
            recomputable.append(False)
            continue
        if node.op == "output":
            returned = [program.output_nodes[number] for number in sorted(let_go)]
            reads.append(tuple(dict.fromkeys(index for value in returned for index in aliasing.of.get(value, ()))))
            writes.append(())
            recomputable.append(False)
            continue
        created = set(aliasing.created_by(node))
        needed: dict[int, None] = {}
        for argument in node.all_input_nodes:
            needed.update(dict.fromkeys(aliasing.of.get(argument, ())))
        reads.append(tuple(index for index in needed if index not in created))
        writes.append(tuple(aliasing.created_by(node)))
        again = again_form(node) is not None and not taken.intersection(aliasing.of.get(node, ()))
        again &= not is_copy_of_input(node)
        recomputable.append(again and not fragile.intersection(_reads_again(node, aliasing)))
    resident = {index for node in program.placeholders for index in aliasing.of.get(node, ())}
    resident.difference_update(index for tangent in tangents for index in aliasing.of[tangent])
    pinned = {
        index
        for number, value in enumerate(program.output_nodes)
        if isinstance(value, fx.Node) and number not in given and number not in let_go
        for index in aliasing.of[value]
        if aliasing.storages[index].producer.op == "call_function"
    }
    if gradients_are_held():
        pinned.update(index for tangent in held_tangents(program) for index in aliasing.of[tangent])
    found = [costs.get(node.name) for node in operations]
    problem = StepProblem(
        sizes=tuple(storage.nbytes for storage in aliasing.storages),
        reads=tuple(reads),
        writes=tuple(writes),
        costs=tuple(cost.seconds if cost else 0.0 for cost in found),
        workspace=tuple(cost.workspace_bytes if cost else 0 for cost in found),
        forward=cut,
        recomputable=tuple(recomputable),
        pinned=frozenset(pinned),
        resident=frozenset(resident),
    )
    kernels = tuple(bool(node.meta.get("kernel")) for node in operations)
    return Lowering(problem, tuple(operations), aliasing, kernels, tuple(_over(problem, operations, aliasing)))


def _over(problem: StepProblem, operations: Sequence[fx.Node], aliasing: Aliasing) -> Iterator[tuple[int, int]]:
    readers = Counter(storage for reads in problem.reads for storage in reads)
    for at, node in enumerate(operations[problem.forward :], problem.forward):
        made = problem.writes[at]
        if len(made) != 1:
            continue
        for operand in may_lie_in(node, lambda value: aliasing.of.get(value, ())):
            held = aliasing.of.get(operand, ())
            if len(held) != 1 or problem.producer[held[0]] < problem.forward or held[0] in problem.pinned:
                continue
            if readers[held[0]] == 1 and problem.sizes[held[0]] == problem.sizes[made[0]]:
                yield made[0], held[0]
                break


def apply_schedule(program: Program, lowering: Lowering, schedule: Schedule) -> Program:
    """Return the program in the schedule's order, each recomputation a node of its own in the backward graph.

    The forward graph stays as it is, but for what nobody reads any more. In the backward graph a copy `x_again` of each
    recomputed node stands where the schedule runs it, and views are rebuilt next to their first use from the tensor
    that owns the storage, so that only whole storages cross from forward to backward.
    """
    known = _APPLIED.setdefault(program, {})
    if schedule not in known:
        known[schedule] = _Emitter(program, lowering).emit(schedule)
    return known[schedule]


def followed(program: Program, costs: Mapping[str, Cost], schedule: Schedule) -> Program:
    """The same for a program whose numbers are not at hand: `costs` as `lower` takes them."""
    known = _APPLIED.get(program, {}).get(schedule)
    return known or apply_schedule(program, lower(program, costs), schedule)


class _Emitter:
    def __init__(self, program: Program, lowering: Lowering) -> None:
        self.program, self.lowering = program, lowering
        self.graph = fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.fused: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}  # since the last library call
        self.operations = set(lowering.operations)
        self.placed: set[fx.Node] = set()

    def emit(self, schedule: Schedule) -> Program:
        program = self.program
        for node in program.graph.nodes:
            if node.op in ("placeholder", "get_attr") or node.meta.get("phase") is Phase.FORWARD:
                self.current[node] = self._copy(node, lambda n: self.current[n])
        forward = dict(self.current)
        self.placed.update(forward)
        done = {node for node in forward if node in self.operations}
        handed = self._handed()
        for step in schedule.steps[schedule.forward :]:
            node = self.lowering.operations[step]
            if node.op == "placeholder":
                continue
            self._run(node, again=node in done)
            done.add(node)
            for value in handed.get(node, ()):  # what shows a gradient that is handed over stands where that is final
                self._resolve(value)
        outputs = []
        for number, value in enumerate(program.output_nodes):
            if isinstance(value, fx.Node):
                value = forward[value] if number < program.forward_outputs else self._resolve(value)
            outputs.append(value)
        result = self.graph.output(outputs)
        result.meta = dict(program.graph.output_node().meta)
        self._drop_unused()
        copy_small_inputs(self.graph, self._inputs())
        self._drop_unused()
        module = module_of(program.graph_module, self.graph)
        return dataclasses.replace(program, graph_module=module).finish()

    def _handed(self) -> dict[fx.Node, list[fx.Node]]:
        """The gradients that are handed over, by the last operation that makes or writes to their memory."""
        program, aliasing = self.program, self.lowering.aliasing
        found: dict[fx.Node, list[fx.Node]] = {}
        last = {index: node for node in self.lowering.operations for index in aliasing.of.get(node, ())}
        for item in hand_overs(program, aliasing):
            for value in (program.output_nodes[number] for number in item.outputs):
                found.setdefault(last[aliasing.of[value][0]], []).append(value)
        return found

    def _copy(self, node: fx.Node, resolve: Any) -> fx.Node:
        copied = copy_node(self.graph, node, resolve)
        fake_calls.copied(node, copied)
        return copied

    def _run(self, node: fx.Node, *, again: bool) -> None:
        if not node.meta.get("kernel"):
            # Kernels are fused between library calls only: a value computed on one side would wait for the other.
            self.fused.clear()
        if again:
            form = again_form(node)
            assert form is not None, f"{node.name} must not run again"
            target, arguments = form
            args, kwargs = fx.map_arg((arguments, node.kwargs), self._resolve)
            copied = self.graph.create_node("call_function", target, args, kwargs, name=f"{node.name}_again")
            copied.meta = {**node.meta, "recomputes": node.name}
            if node.meta["phase"] is Phase.FORWARD:  # what backward itself computes reads what eager's reads
                copied.meta[RECOMPUTED] = True
        else:
            copied = self._copy(node, self._resolve)
        copied.meta["phase"] = Phase.BACKWARD
        self._set(node, copied)
        for item in node.users:
            if item.target is operator.getitem:
                if again and not self._has_item(copied, item):
                    continue
                piece = self.graph.create_node(
                    "call_function",
                    operator.getitem,
                    (copied, item.args[1]),
                    name=f"{item.name}_again" if again else item.name,
                )
                piece.meta = {**item.meta, "phase": Phase.BACKWARD}
                self._set(item, piece)

    def _has_item(self, copied: fx.Node, item: fx.Node) -> bool:
        index: Any = item.args[1]
        return copied.target is not _BATCH_NORM_AGAIN or index < OTHER_FORM_RESULTS

    def _set(self, node: fx.Node, copied: fx.Node) -> None:
        # The first copy of what the caller holds is the one that is returned; a later copy dies at once.
        pinned = set(self.lowering.aliasing.of.get(node, ())) & self.lowering.problem.pinned
        if node not in self.current or not pinned:
            self.current[node] = copied

    def _resolve(self, node: fx.Node) -> fx.Node:
        """The present copy of a value in backward; a view is built anew from its base."""
        if node.op != "call_function" or owner(node) in self.operations:
            return self.current[node]
        arguments = tuple(self._resolve(argument) for argument in node.all_input_nodes)
        key = (node, arguments)
        known = self.fused if node.meta.get("fused") else self.views
        if key not in known:
            mapping = dict(zip(node.all_input_nodes, arguments, strict=True))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: mapping[n])
            # Names that the program has already stay those of its own nodes.
            name = f"{node.name}_again" if node in self.placed else node.name
            self.placed.add(node)
            known[key] = copied = self.graph.create_node("call_function", node.target, args, kwargs, name=name)
            copied.meta = {**node.meta, "phase": Phase.BACKWARD}
            if node.meta["phase"] is Phase.FORWARD:
                copied.meta[RECOMPUTED] = True
        return known[key]

    def _inputs(self) -> set[fx.Node]:
        """What the caller may write to between forward and backward."""
        kinds = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER}
        placeholders = zip(self.program.inputs, self.program.placeholders, strict=True)
        return {self.current[node] for entry, node in placeholders if entry.kind in kinds}

    def _drop_unused(self) -> None:
        # A forward operation too: what it makes early for backward may be made there again each time it is read.
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not is_random(node) and not is_effectful(node):
                self.graph.erase_node(node)


def _is_operation(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether the node does work of its own: it allocates, draws, has effects, or yields no tensor at all."""
    if node.target is operator.getitem or node.meta.get("fused"):
        return False
    makes = bool(aliasing.created_by(node)) or "inplace" in node.meta
    return makes or not aliasing.of.get(node) or is_random(node) or is_effectful(node)


def again_form(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator and the arguments that compute the node's value once more, or None where that is not allowed."""
    if is_random(node) or is_effectful(node) or not isinstance(node.target, OpOverload):
        return None
    if node.target is _BATCH_NORM:
        data, weight, bias, _, _, training, momentum, epsilon = node.args
        # The running statistics must move once only, and in training the result does not depend on them.
        return (_BATCH_NORM_AGAIN, (data, weight, bias, True, momentum, epsilon)) if training is True else None
    return node.target, node.args


def _reads_again(node: fx.Node, aliasing: Aliasing) -> list[int]:
    form = again_form(node)
    if form is None:
        return []
    found: list[int] = []
    fx.map_arg(form[1], lambda n: found.extend(aliasing.of.get(n, ())))
    return found
