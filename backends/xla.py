"""The xla backend: forward and backward as XLA executables that share PyTorch's memory.

Each rewritten graph is lowered to StableHLO and compiled by XLA for the device that the model is on. Tensors go in and
come out by DLPack, in place. XLA fuses and orders for itself, so a plan is judged by the compiler's own analysis of
the executables that came of it. What crosses from forward to backward is what the plan keeps: two executables, so that
XLA cannot merge what is recomputed with its original. Under a budget both are cut in pieces, in the plan's order;
what a piece was the last to read is freed behind it. The optimizer stays PyTorch's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit, emit_collected
from memopt.budget import BudgetError
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.capture.watched import Watched
from memopt.engine import Engine
from memopt.memory.cost.table import CostTable, OperatorCost
from memopt.program import InputKind, OutputKind, Program, tensors_of
from memopt.report.record import ExecutableReport
from memopt.step.graph_peaks import GraphPeaks, gradients_of
from memopt.step.inference import emitted_inference
from memopt.step.plan_request import PlanRequest
from memopt.torch_compat.aot_autograd import aot_autograd, aot_settings
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.donated import nothing_donated
from memopt.torch_compat.fake_tensors import no_fake_mode
from memopt.torch_compat.tracing_context import out_of_trace

if TYPE_CHECKING:
    from memopt.compilation.session import Session

# Attempts to keep a budget: operators in a piece of a graph, and parts of the batch in which convolutions are run.
# Smaller pieces and parts hold less, and are slower.
PIECES = ((80, 1), (20, 1), (5, 4), (1, 4))
WHOLE = (0, 1)


class XlaBackend(Engine):
    """Runs graphs as XLA executables on the CPU or on CUDA.

    Args:
        device: where the model is.

    Raises:
        ValueError: a package is missing, or XLA has no such device; one line says what to install.
    """

    name = "xla"
    exact = False
    recurrent = False
    measures = True  # the compiler says what its executables take: the program's own timeline is that of other kernels

    def __init__(self, device: torch.device) -> None:
        for package in ("jax", "torchax"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"backend 'xla' needs {package}: pip install memopt[xla]")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"backend 'xla' runs on cpu and cuda, not on {device.type}")
        if device.type == "cuda":
            _check_cuda()

    def compile_captured(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Any:
        """Lower one Dynamo graph, both graphs at once where gradients are asked for.

        Raises:
            LowerError: an operator has no form under XLA; one line names it and its source line.
            BudgetError: no plan's executables keep the budget.
        """
        session = compilation_of(hooks)
        if not isinstance(session.table, XlaCosts):
            session.costs_by(XlaCosts(session.table))
        if hooks.dry:
            return _aot(graph_module, example_inputs, hooks, _emit, _emit)
        if hooks.needs_gradients:
            return _Training(graph_module, example_inputs, hooks).compile()

        return _aot(graph_module, example_inputs, hooks, _emit, _emit)


class XlaCosts(CostTable):
    """Costs of operators without the workspace of PyTorch's kernels: XLA has others, and its analysis counts theirs."""

    def __init__(self, table: CostTable) -> None:
        super().__init__(table.limit_bytes, ceiling_bytes=table.ceiling_bytes, target=table.target)

    def measure_all(self, program: Program) -> dict[str, OperatorCost]:
        """Return what every call node takes, by name."""
        found = super().measure_all(program)
        return {name: dataclasses.replace(cost, workspace_bytes=0) for name, cost in found.items()}


def _aot(graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks, forward: Any, backward: Any) -> Any:
    """Lower with AOTAutograd: these compilers for forward and backward graph, memopt's own for inference."""
    session = compilation_of(hooks)

    stays: set[str] = set()

    def build(module: fx.GraphModule) -> Boxed:
        resident = {node.name for node in module.graph.nodes}
        for cut in (WHOLE, *PIECES) if session.budget is not None else (WHOLE,):
            graph = _CompiledGraph(module, cut=cut, stays=stays)
            excess = emitted_inference(session, graph.executable.usage(resident)[0]) or 0
            if excess <= 0:
                session.compiled(graph.records("inference"))
                return graph
        raise _over(session, excess)

    def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        if hooks.dry:
            return emit_collected(module, hooks)
        program, rewrite = hooks.inference(module)
        stays.update(_staying(program))
        return Watched(program, rewrite, build)

    lower = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=hooks.partition
    )
    # XLA never writes over what PyTorch gives it, so backward may be run again (`retain_graph`).
    with (
        aot_settings(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        nothing_donated(),
    ):
        return lower(graph_module, example_inputs)


def _emit(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
    return emit(module)


class _CompiledGraph:
    """One compiled graph as AOTAutograd calls it."""

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        exact: int | None = None,
        cut: tuple[int, int] = WHOLE,
        stays: Collection[str] = (),
        own: Collection[str] = (),
        together: Sequence[OutputKind] = (),
    ) -> None:
        """Compile.

        Args:
            module: the graph.
            exact: how many leading results a caller sees, in PyTorch's layout; the others are memopt's own. None: all.
            cut: operators in a piece (0: one piece), and parts of the batch that a convolution may be run in.
            stays: names of the parameters and buffers among its arguments.
            own: names of the arguments that another graph compiled here has made.
            together: what the leading results are. New values of buffers, which are copied there, and gradients may
                share memory with one another.
        """
        from memopt.xla.executable import Executable

        results: Any = module.graph.output_node().args[0]
        kinds = dict(zip(results, together, strict=False))
        kinds.update((node, kind) for node, kind in zip(results, together, strict=False) if kind is OutputKind.USER)
        shared = {n.name for n, kind in kinds.items() if isinstance(n, fx.Node) and kind is not OutputKind.USER}
        seen = [exact is None or number < exact for number in range(len(results))]
        with out_of_trace(), no_fake_mode(), torch.no_grad():
            self.executable = Executable(
                module,
                _device_of(module),
                size=cut[0],
                parts=cut[1],
                stays=stays,
                own=own,
                exact=seen,
                together=shared,
            )
        boxed(self)
        self.names = [node.name if isinstance(node, fx.Node) else None for node in results]

    def records(self, name: str) -> list[ExecutableReport]:
        """What the compiler says of each piece."""
        found = self.executable.memories
        several = f" of {len(found)}" if len(found) > 1 else ""
        return [
            ExecutableReport(
                f"{name}, piece {number}{several}" if several else name, one.arguments, one.outputs, one.temporaries
            )
            for number, one in enumerate(found, 1)
        ]

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on a list of inputs, which is emptied."""
        return self.executable(args)


class _Training:
    """One graph of a training step: planned, compiled, judged by the compiler's analysis, planned again if over."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        self._graph_module, self._example_inputs, self._hooks = graph_module, example_inputs, hooks
        self._session = compilation_of(hooks)
        self._graphs: dict[str, _CompiledGraph] = {}
        self._forward_outputs, self._request = 0, PlanRequest()

    def compile(self) -> Callable[..., Any]:
        """Compile plans until the executables of one keep the budget.

        Raises:
            BudgetError: those of none do.
        """
        session = self._session
        self._request = PlanRequest(search=session.budget is not None)  # without one, nothing is recomputed
        try:
            for cut in PIECES if session.budget is not None else (WHOLE,):
                run = self._attempt(cut)
                saving, excess = session.emitted(self._captured(), self._peaks())
                if excess is None or excess <= 0:
                    session.compiled([one for name, graph in self._graphs.items() for one in graph.records(name)])
                    return run
                if cut == PIECES[-2]:
                    self._request.correction = -session.limit_bytes  # the last attempt is of the plan that takes least
                elif session.one_graph and session.feasible:
                    self._request.correction = saving - excess // 8
            assert excess is not None
            raise _over(session, excess)
        finally:
            session.forget_search()

    def _attempt(self, cut: tuple[int, int]) -> Callable[..., Any]:
        self._graphs.clear()

        def forward(module: fx.GraphModule, inputs: Sequence[Any]) -> _CompiledGraph:
            self._graphs["forward"] = _CompiledGraph(
                module, exact=self._forward_outputs, cut=cut, stays=self._stays(), together=self._kinds()[0]
            )
            return self._graphs["forward"]

        def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> _CompiledGraph:
            given = {node.name for node in module.graph.find_nodes(op="placeholder")}
            own = given - {entry.name for entry in self._captured().inputs}
            self._graphs["backward"] = _CompiledGraph(
                module, cut=cut, stays=self._stays(), own=own, together=self._kinds()[1]
            )
            return self._graphs["backward"]

        partition = self._hooks.partition

        def counted(joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **options: Any) -> Any:
            self._forward_outputs = num_fwd_outputs
            return partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, request=self._request, **options)

        self._hooks.partition = counted  # type: ignore[method-assign]
        try:
            return _aot(self._graph_module, self._example_inputs, self._hooks, forward, backward)  # type: ignore[no-any-return]
        finally:
            self._hooks.partition = partition  # type: ignore[method-assign]

    def _stays(self) -> set[str]:
        return _staying(self._captured())

    def _kinds(self) -> tuple[list[OutputKind], list[OutputKind]]:
        """What the results of forward and of backward are."""
        program = self._captured()
        parameters = {entry.name for entry in program.inputs if entry.kind is InputKind.PARAMETER}
        kinds = [
            OutputKind.USER if output.kind is OutputKind.GRADIENT and output.target not in parameters else output.kind
            for output in program.outputs
        ]
        return kinds[: program.forward_outputs], kinds[program.forward_outputs :]

    def _captured(self) -> Program:
        assert self._hooks.captured is not None
        return self._hooks.captured

    def _peaks(self) -> GraphPeaks:
        """What the executables take, in bytes above what is resident."""
        program = self._captured()
        forward, backward = self._graphs["forward"].executable, self._graphs["backward"].executable
        resident = {entry.name for entry in program.inputs if entry.kind is not InputKind.TANGENT}
        peak, saved = forward.usage(resident)
        highest, left = backward.usage(resident)
        kinds = {entry.name: entry.kind for entry in program.inputs}
        gradients = zip(program.outputs[program.forward_outputs :], backward.result_bytes, strict=True)
        passed_on = sum(
            size
            for output, size in gradients
            if output.kind is OutputKind.GRADIENT and kinds.get(output.target or "") is InputKind.USER
        )
        # What the caller holds of forward's results stays beside backward.
        held = {n for n in self._graphs["forward"].names[: self._forward_outputs] if n}
        beside = forward.bytes_of(held - backward.argument_names - resident)
        return GraphPeaks(peak, highest + beside, saved, max(0, left - passed_on) + beside, gradients_of(program))


def _staying(program: Program) -> set[str]:
    return {entry.name for entry in program.inputs if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)}


def _over(session: Session, excess: int) -> BudgetError:
    assert session.report is not None and session.report.budget_bytes is not None
    limit = session.report.budget_bytes
    return BudgetError(limit + excess, limit, session.report.breakdown)


def _device_of(module: fx.GraphModule) -> torch.device:
    for node in module.graph.nodes:
        for value in tensors_of(node):
            if value.device.type != "cpu":
                return value.device
    return torch.device("cpu")


def _check_cuda() -> None:
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        raise ValueError("backend 'xla' on CUDA needs JAX with CUDA: pip install 'jax[cuda13]'") from error
