"""The forward and backward graph of a training step as Inductor lowered them.

What they take is known at once; their kernels are compiled only when they are to run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.hand_over import drained
from memopt.backends.hand_over import in_pieces as run_in_pieces
from memopt.capture.dependence import SavedFor, saved_in_part
from memopt.common.phases import phase
from memopt.common.progress import stage
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.signature import signature_of
from memopt.cuda_graphs.step import CudaGraphStep
from memopt.inductor.forked_codegen import BegunError, ForkedCodegen, lays_out
from memopt.inductor.generated import GeneratedCode, cuda_graph_step
from memopt.inductor.loading import Call, loaded_by
from memopt.inductor.offload import waiting
from memopt.inductor.pieces import NAMES, Pieces, in_pieces
from memopt.inductor.replay import Meter, ReplayError, Workspace, Wrapper, replay
from memopt.memory.aliasing import analyse
from memopt.memory.hand_over import due, showing
from memopt.memory.timeline import held_of
from memopt.program import InputKind, OutputKind, Program, copy_node, module_of
from memopt.step.graph_peaks import GraphPeaks, gradients_of
from memopt.step.own_copies import recomputed_from
from memopt.torch_compat import tracing_context
from memopt.torch_compat.donated import donated_now
from memopt.torch_compat.fake_tensors import FakeTensorMode
from memopt.torch_compat.inductor_compile import backward_begins_with, code_cache_hits, compile_traced
from memopt.torch_compat.inductor_settings import partitioner_in_force
from memopt.torch_compat.returned import writable
from memopt.torch_compat.storages import storage_id


class GraphCode(GeneratedCode):
    """Forward or backward graph: the names and fake values of its inputs and outputs, and its generated code."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.inputs = [(node.name, node.meta.get("val")) for node in placeholders]
        outputs: Any = module.graph.output_node().args[0]
        self.outputs = [value.name if isinstance(value, fx.Node) else None for value in outputs]
        self.waiting = waiting(module)  # bytes of each value that waits on the host


class ForwardBackward:
    """Collects both graphs while `compile_fx` lowers one joint graph."""

    def __init__(
        self,
        around_backward: Callable[[Call], Call],
        ahead: ForkedCodegen | None = None,
        meanwhile: Callable[[ForwardBackward], None] | None = None,
        *,
        breaks: bool = False,
    ) -> None:
        """Nothing is lowered yet.

        Args:
            around_backward: put around backward as it runs.
            ahead: what may generate the code of backward while that of forward is generated.
            meanwhile: called once forward is lowered, where backward is not yet there.
            breaks: whether the model has other graphs.
        """
        self.forward: GraphCode | None = None
        self.backward: GraphCode | None = None
        self._around_backward, self._ahead, self._meanwhile = around_backward, ahead, meanwhile
        self._breaks = breaks
        self._followed: _Followed | None = None
        self.recomputed: Sequence[str] = ()  # inputs that backward reads to recompute values
        self.in_part: Sequence[SavedFor] = ()  # what is saved for some outputs only
        self._forward_graph: fx.GraphModule | None = None  # until backward is there
        self._in_inputs: set[str] = set()  # what forward may hold in the memory of its inputs

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Inductor's inner compiler, with the kernels left for later."""
        code = GraphCode(module)
        if options.get("is_backward"):
            self.backward = code
            if self._forward_graph is not None:
                self.recomputed = recomputed_from(self._forward_graph, module)
                self.in_part = saved_in_part(self._forward_graph, module, breaks=self._breaks)
                self._forward_graph = None
        else:
            self.forward, self._forward_graph = code, copy_of(module)  # lowered, its values have other names
            self._in_inputs = _kept_in_inputs(module)
            code.around = functools.partial(writable, in_part=lambda: [item.place for item in self.in_part])
        donated, partition = donated_now(), partitioner_in_force()
        if code is self.backward:
            donated[:] = [place for place in donated if code.inputs[place][0] not in self._in_inputs]
        if code is self.backward and partition is not None:
            partition.donated = tuple(donated)
        if self._ahead is None or not self._ahead.inside:
            stage(f"generating code of {'backward' if code is self.backward else 'forward'}")
        begins = backward_begins_with(self._around_backward)
        with phase("generating code"), loaded_by(code.defer), begins:
            if self._ahead is None:
                run = compile_traced(module, example_inputs, **options)
            else:
                run = self._beside(self._ahead, code, module, example_inputs, options)
        if code is self.backward:
            donated.clear()  # a graph may be kept: what is written over is copied then
        return run

    def _beside(
        self,
        ahead: ForkedCodegen,
        code: GraphCode,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Any:
        """One graph lowered where a copy of this process may be lowering backward, or this is that copy."""
        if code is self.forward:
            return _forward_beside(ahead, module, inputs, options)
        if ahead.running and self._meanwhile is not None:
            ahead.listen()
            self._meanwhile(self)
        made, before = ahead.wait(), code_cache_hits()
        compiled = compile_traced(module, inputs, **options)
        if ahead.inside:
            ahead.leave()
        if made and code_cache_hits() == before:
            ahead.missed()
        return compiled

    def load(self) -> None:
        """Compile and load the kernels of both graphs."""
        stage("compiling kernels")
        for code in (self.forward, self.backward):
            if code is not None:
                code.load()

    def hand_over(self, program: Program, names: Iterable[str], guarded: Callable[[Call], Call]) -> Pieces | None:
        """Have backward give gradients of these parameters as soon as its code is through with them.

        Args:
            program: the joint program that was lowered.
            names: of the parameters.
            guarded: wraps what runs a piece, for errors.

        Returns:
            The code in pieces; None where it gives none of them before it ends.
        """
        backward = self.backward
        if backward is None or backward.wrapper is None:
            return None
        aliasing = analyse(program)
        wanted = due(program, aliasing, names)
        found = backward.pieces = in_pieces(backward.wrapper.source, wanted, showing(program, aliasing))
        if found is not None:
            backward.instead = run_in_pieces(backward.generate, len(backward.outputs), found.outputs, guarded)
        return found

    def cuda_graph_step(self, program: Program, pool: GraphPool) -> CudaGraphStep | None:
        """Both graphs as `memopt.inductor.generated.cuda_graph_step` has them; None where their ends are not known.

        Args:
            program: the joint program that was lowered.
            pool: where they would be captured.
        """
        forward, backward = self.forward, self.backward
        if forward is None or backward is None or backward.pieces is not None:
            return None
        fixed = {entry.name for entry in program.inputs if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
        names = [name for name, _ in forward.inputs]
        gradients = [output.target for output in program.outputs[program.forward_outputs :]]
        signature = signature_of(names, forward.outputs, [name for name, _ in backward.inputs], fixed, gradients)
        return None if signature is None else cuda_graph_step(forward, backward, signature, pool)

    def at(self, sized: Callable[[Any], Any]) -> ForwardBackward:
        """The same graphs to count what their code takes, with other fake values at its ends: those of other sizes."""
        found = copy.copy(self)
        found._followed = None
        for name in ("forward", "backward"):
            code = copy.copy(getattr(self, name))
            if code is not None:
                names, values = [name for name, _ in code.inputs], [value for _, value in code.inputs]
                code.inputs = list(zip(names, sized(values), strict=True))
            setattr(found, name, code)
        return found

    def follow_forward(self, workspace: Workspace) -> None:
        """Follow forward's code before that of backward is there: `peaks` goes on from its end, with this workspace."""
        if self.forward is not None and self.forward.wrapper is not None:
            with contextlib.suppress(ReplayError):
                self._followed = _followed(self.forward, self.forward.wrapper, workspace)
                self._followed.meter.settle()

    def peaks(self, program: Program, workspace: Workspace) -> GraphPeaks:
        """What the generated code takes, in bytes above what is resident.

        Args:
            program: the joint program that was lowered.
            workspace: bytes that a call takes beyond its results, by operator and arguments.

        Raises:
            ReplayError: the generated code could not be followed.
        """
        forward, backward = self.forward, self.backward
        if forward is None or backward is None or forward.wrapper is None or backward.wrapper is None:
            raise ReplayError("Inductor generated no Python code for one graph")
        followed, self._followed = self._followed or _followed(forward, forward.wrapper, workspace), None
        mode, meter, results = followed.mode, followed.meter, followed.results
        peak_forward = meter.peak
        values = {**dict(forward.inputs), **dict(zip(forward.outputs, results, strict=True))}
        held = [
            value
            # What forward updates itself is not among its results: saved tensors stand there, and those behind them.
            for output, value in zip(program.outputs[: program.forward_outputs], results, strict=False)
            if output.kind is OutputKind.USER and isinstance(value, torch.Tensor) and not output.let_go
        ]
        read = {name for name, _ in backward.inputs}
        values = {name: value for name, value in values.items() if name in read}
        del results, followed
        saved = meter.live
        with mode:  # what forward did not make is a tangent: it appears where backward starts
            arguments = [
                values[name] if name in values else torch.empty_like(fake) if isinstance(fake, torch.Tensor) else fake
                for name, fake in backward.inputs
            ]
        given = [value for (name, _), value in zip(backward.inputs, arguments, strict=True) if name not in values]
        roots = held_of([value for value in given if isinstance(value, torch.Tensor)])
        del values, given
        meter.add(arguments)
        meter.mark()
        gradients, early = _backward_replayed(backward, program, arguments, mode, meter)
        del roots
        end = meter.live
        kinds = {entry.name: entry.kind for entry in program.inputs}
        passed_on = [
            value
            for output, value in zip(program.outputs[program.forward_outputs :], gradients, strict=False)
            if kinds.get(output.target or "") is InputKind.USER and isinstance(value, torch.Tensor)
        ]
        left = end - sum({storage_id(v): v.untyped_storage().nbytes() for v in passed_on}.values())
        del held, early
        return GraphPeaks(peak_forward, meter.peak, saved, max(0, left), gradients_of(program))


@dataclasses.dataclass
class _Followed:
    """Forward's code after it ran on fake tensors."""

    mode: FakeTensorMode
    meter: Meter
    results: list[Any]


def _backward_replayed(
    backward: GraphCode, program: Program, arguments: list[Any], mode: FakeTensorMode, meter: Meter
) -> tuple[list[Any], list[Any]]:
    """What backward's code returns on fake arguments, and those of what it gave before that are not dropped then."""
    assert backward.wrapper is not None
    pieces, early = backward.pieces, list[Any]()
    if pieces is None:
        return replay(backward.wrapper, arguments, mode, meter), early
    late = program.outputs[program.forward_outputs :]

    def give(number: int, values: Sequence[Any]) -> None:
        early.extend(
            value for place, value in zip(pieces.outputs[number], values, strict=True) if not late[place].handed
        )

    wrapper = Wrapper(pieces.source, {**backward.wrapper.attributes, **NAMES})
    results = replay(wrapper, arguments, mode, meter, lambda call, given: drained(call, give)(given))
    return results, early


def _followed(forward: GraphCode, wrapper: Wrapper, workspace: Workspace) -> _Followed:
    values = [value for _, value in forward.inputs]
    mode, meter = _mode(values), Meter(workspace)
    meter.ignore(values)
    return _Followed(mode, meter, replay(wrapper, list(values), mode, meter))


def peak_of(code: GraphCode, sized: Callable[[Any], Any], workspace: Workspace) -> int:
    """The most bytes that a graph's code takes beside its inputs, results included.

    Args:
        code: whose code is known.
        sized: makes fake values of those at its ends, of the sizes that are asked for.
        workspace: bytes that a call takes beyond its results, by operator and arguments.

    Raises:
        ReplayError: the generated code could not be followed.
    """
    if code.wrapper is None:
        raise ReplayError("Inductor generated no Python code")
    found = copy.copy(code)
    values = sized([value for _, value in code.inputs])
    found.inputs = [(name, value) for (name, _), value in zip(code.inputs, values, strict=True)]
    return _followed(found, code.wrapper, workspace).meter.peak


def _forward_beside(
    ahead: ForkedCodegen, module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    if lays_out(module):
        if any(isinstance(value, torch.SymInt) for value in inputs):  # strides of symbols are no numbers to hand on
            return compile_traced(module, inputs, **options)
    else:
        return _nowhere if ahead.begin(module, inputs) else compile_traced(module, inputs, **options)
    try:
        with ahead.once_laid_out(module, inputs):
            return compile_traced(module, inputs, **options)
    except BegunError as begun:
        reported = tracing_context.context().output_strides
        if reported is not None:
            reported.extend(begun.strides)
        return _nowhere


def _nowhere(args: list[Any]) -> Any:
    """Forward where it is not lowered: nothing calls it."""
    raise AssertionError("a copy of the process that generates code ran a step")


def _mode(values: Any) -> FakeTensorMode:
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), FakeTensorMode())


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, which keeps what is known of its nodes."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        made[node] = copy_node(graph, node, made.__getitem__)
    return module_of(module, graph)


def _kept_in_inputs(forward: fx.GraphModule) -> set[str]:
    """Values of forward that code may hold in an input that they are copied to: backward must not write over them."""
    copied = [node.args[1] for node in forward.graph.nodes if node.target is torch.ops.aten.copy_.default]
    memory = {_memory(node) for node in copied if isinstance(node, fx.Node)} - {None}
    return {node.name for node in forward.graph.nodes if node in copied or _memory(node) in memory}


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_id(value)
