"""A call without gradients lowered once for many sizes: Inductor's code of a graph whose sizes are symbols.

The code's wrapper, run on fake tensors, tells what it takes at any sizes. Where there is a budget they are counted
before they run, for half as large again as are needed: the keys and values of a language model grow at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from memopt.capture.at_sizes import at_sizes
from memopt.capture.dynamo import Hooks, compilation_of, outside_tracing
from memopt.capture.joint import program_of_graph
from memopt.common.phases import phase
from memopt.engine import ManySizes
from memopt.inductor.edits import edits
from memopt.inductor.forward_backward import GraphCode, copy_of, peak_of
from memopt.inductor.loading import loaded_by
from memopt.inductor.own_memory import note_memory
from memopt.inductor.padding import product_settings
from memopt.inductor.served_sizes import ServedSizes, sizes_errors
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.resident import storage_bytes
from memopt.memory.timeline import timeline
from memopt.passes.checkpoint import workspace
from memopt.program import InputKind, Program
from memopt.step.inference import emitted_inference
from memopt.step.planned import Planned, constant_bytes
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.aot_autograd import aot_settings
from memopt.torch_compat.dead_draws import dead_draws_kept
from memopt.torch_compat.inductor_compile import compile_graph, compile_traced
from memopt.torch_compat.log_suppression import unread_logs_suppressed
from memopt.torch_compat.symbols import Sized, Sizes, grows_everywhere, hints_of


class SymbolicInference:
    """One graph's lowering for many sizes."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph whose sizes are symbols, its inputs, and what they are to the model."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session = compilation_of(hooks)
        self._sizes = ServedSizes(hooks, example_inputs)
        self._graph: fx.GraphModule | None = None  # as AOTAutograd traced it
        self._code: GraphCode | None = None

    def compile(self) -> ManySizes:
        """Lower the graph for the sizes of this call, and for others.

        Raises:
            SizesError: no code is made of such a graph.
        """
        if self.hooks.graph_break:
            raise SizesError("a call of several graphs is planned graph by graph")
        with sizes_errors():
            sizes = hints_of(self.example_inputs)
            # A function that torch's cache has of the graph would come as a whole, without the code that is counted.
            with dead_draws_kept(), unread_logs_suppressed(), aot_settings(enable_autograd_cache=False):
                module = fx.GraphModule(self.graph_module, self.graph_module.graph)
                patches = {"graph_partition": False, **product_settings(module), **edits(note_memory)}
                run = compile_graph(module, self.example_inputs, self._lowered, patches)
            if self._graph is None:
                raise SizesError("the graph has gradients")
            self._sizes.grows = grows_everywhere(self._graph)
            self._serve(sizes)
        self.example_inputs = ()  # they are the caller's to let go of
        return ManySizes(self.count_for, run)

    def count_for(self, args: Sequence[Any]) -> None:
        """Count what the code takes with these inputs of the graph, where that is not known and there is a budget.

        Raises:
            SizesError: the budget is not kept at their sizes.
        """
        if self.session.budget is None:
            return
        sizes = self._sizes.of(args)
        if self._sizes.kept(sizes):
            return
        if not self._sizes.refused(sizes):
            larger = {symbol: size + size // 2 for symbol, size in sizes.items()}
            if any(self._serve(each) for each in ((larger, sizes) if self._sizes.grows else (sizes,))):
                return
        raise self._sizes.not_kept(sizes)

    def _lowered(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_inference"):
            return compile_traced(module, inputs, **options)
        self._graph, self._code = copy_of(module), GraphCode(module)
        with phase("generating code"), loaded_by(self._code.defer):
            return compile_traced(module, inputs, **options)

    def _serve(self, sizes: Sizes) -> bool:
        """Count what the code takes at these sizes and put it on record; whether the budget is kept."""
        session = self.session
        before = session.report, session.inferred.planned
        with outside_tracing():
            kept = self._excess(sizes) <= 0
        if kept:
            self._sizes.keep(sizes)
        else:
            self._sizes.refuse(sizes)
            session.reports(before[0])
            session.inferred.goes_back_to(before[1])
        return kept

    def _excess(self, sizes: Sizes) -> int:
        """Bytes over the budget; negative or 0 where it is kept.

        Raises:
            SizesError: the code could not be followed.
        """
        session, program = self.session, self._program(sizes)
        code = self._code
        assert code is not None
        with sizes_errors(), phase("replaying code"):
            peak = peak_of(code, Sized(sizes), MeasuredWorkspace(session.table))
        session.prepare_allocator()
        line = timeline(program, workspace(program, session.table.measure_all(program)))
        own = session.resident.total + constant_bytes(program) + line.peak_bytes
        if not session.role.trains:
            session.reference.infers(own)
        session.held_to(own)
        session.inferred.goes_back_to(Planned(program, program, program, line, line, (), {}))
        # Inputs of larger sizes than there are now are larger themselves.
        given = [node.meta["val"] for node, entry in zip(program.placeholders, program.inputs, strict=True)
                 if entry.kind is InputKind.USER]  # fmt: skip
        return emitted_inference(session, peak + max(0, storage_bytes(given) - session.resident.inputs)) or 0

    def _program(self, sizes: Sizes) -> Program:
        assert self._graph is not None
        return program_of_graph(at_sizes(self._graph, sizes), self.hooks.origins)
