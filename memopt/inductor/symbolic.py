"""A training step lowered once for many sizes: Inductor's code of a joint graph whose sizes are symbols.

Torch's own partitioner cuts the graph. The code's wrapper, run on fake tensors, tells what it takes at any sizes: those
that were counted for run at once, and smaller ones where every tensor is smaller then; others are counted first, and
planned by themselves where they would be over the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch._inductor.exc import InductorError

from memopt.capture.at_sizes import at_sizes
from memopt.capture.dynamo import Hooks
from memopt.capture.joint import Halved
from memopt.engine import ManySizes
from memopt.errors import first_line
from memopt.inductor.halves import Halves
from memopt.inductor.own_cut import save_overwritten
from memopt.inductor.partition import Partition, compile_training
from memopt.inductor.replay import ReplayError
from memopt.inductor.trace import Trace
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.distributed import has_group
from memopt.phases import phase
from memopt.program import Program, tensors_of
from memopt.step.planner import GraphPeaks
from memopt.step.rewriting import Rewriting
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.symbols import Sized, Sizes, UnknownSizeError, grows, hints_of, symbols_of


class SymbolicTraining:
    """One graph's lowering for many sizes."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph whose sizes are symbols, its inputs, and what makes a program of its joint graph."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session: Any = hooks.session
        self._names = {symbol: hooks.called(place) for place, symbol in symbols_of(example_inputs).items()}
        self.grows = False  # whether larger sizes make every tensor larger
        self._trace = Trace()
        self._joint: tuple[fx.GraphModule, int] | None = None  # with symbols, and how many outputs forward has
        self._planned: tuple[fx.GraphModule, Sizes, Program] | None = None  # that graph at the sizes planned for last

    def compile(self) -> ManySizes:
        """Lower the step for the sizes of this call, and for others.

        Raises:
            SizesError: the code does not keep the budget, or none is made of such a graph.
        """
        session = self.session
        if self.hooks.graph_break or session.calls > 1 or has_group():
            raise SizesError("a step of several graphs, calls or processes shares its budget among them")
        if session.hooked is not None and session.hooked.names:
            raise SizesError("gradients are handed over within backward")
        try:
            sizes = hints_of(self.example_inputs)
            with self._alone():
                code = self._lowered(sizes)
        except UnknownSizeError as error:
            raise SizesError(str(error)) from error
        self.example_inputs, self._trace = (), Trace()  # they are the caller's to let go of
        return ManySizes(code.count_for, code.run)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, the session plans nothing, and rewrites nothing: the cut is torch's own."""
        session = self.session
        before = session.rewriting
        session.search, session.proving, session.lowering = False, False, ()
        session.rewriting = Rewriting((), session.engine(), session.table)
        try:
            yield
            session.conclude()
        finally:
            session.search, session.proving, session.rewriting = True, True, before
            session.forget_search()

    def _lowered(self, sizes: Sizes) -> _Code:
        halves = Halves(self.hooks.backward, breaks=False)

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Halved:
            self._joint = joint, options["num_fwd_outputs"]
            self.grows = all(grows(n) for node in joint.graph.nodes for value in tensors_of(node) for n in value.shape)
            save_overwritten(joint, self.plan(sizes).mutated)
            with phase("cutting"):
                halved: Halved = partitioners.min_cut_rematerialization_partition(
                    joint, joint_inputs, compiler="inductor", **options
                )
            return halved

        try:
            run = compile_training(self.graph_module, self.example_inputs, halves.compile, Partition(cut), self._trace)
        except InductorError as error:
            raise SizesError(f"Inductor has no code for this graph with symbolic sizes: {first_line(error)}") from error
        code = _Code(run, halves, self, symbols_of(self.example_inputs))
        excess = self.count(halves, sizes)
        if excess is not None and excess > 0:
            raise SizesError(self.not_kept(sizes))
        code.served = [sizes]
        with phase("compiling kernels"):
            halves.load()
        self.hooks.recomputed, self.hooks.in_part = halves.recomputed, halves.in_part
        return code

    def plan(self, sizes: Sizes) -> Program:
        """The step at these sizes as the session plans it, which is as it is."""
        assert self._joint is not None
        joint, outputs = self._joint
        if self._planned is None or self._planned[:2] != (joint, sizes):
            self._planned = joint, sizes, self.hooks.rewrite(at_sizes(joint, sizes), outputs)
        return self._planned[2]

    def count(self, halves: Halves, sizes: Sizes) -> int | None:
        """Put on record what code of the step that was planned last takes at these sizes.

        Returns:
            Bytes over the budget; None without one.

        Raises:
            SizesError: the code could not be followed.
        """
        captured = self.hooks.captured
        assert captured is not None
        try:
            with phase("replaying code"):
                peaks: GraphPeaks = halves.at(Sized(sizes)).peaks(captured, MeasuredWorkspace(self.session.table))
        except ReplayError as error:
            raise SizesError(f"what code with symbolic sizes takes is not known: {error}") from error
        excess: int | None = self.session.emitted(captured, peaks)[1]
        return excess

    def not_kept(self, sizes: Sizes) -> str:
        """That the budget is not kept at these sizes, in words."""
        listed = ", ".join(f"{self._names[symbol]} = {size}" for symbol, size in sizes.items())
        return f"code for many sizes does not keep the budget at {listed}"

    def grow(self, halves: Halves, sizes: Sizes) -> None:
        """Count what code takes at sizes that are larger than all that it was counted for.

        Args:
            halves: of the code.
            sizes: of the symbols.

        Raises:
            SizesError: the budget is not kept at these.
        """
        session, hooks = self.session, self.hooks
        before = session.step, hooks.captured, self._planned
        with self._alone():
            self.plan(sizes)
            excess = self.count(halves, sizes)
            if excess is not None and excess > 0:
                session.step, hooks.captured, self._planned = before
                raise SizesError(self.not_kept(sizes), others=True)


@dataclasses.dataclass
class _Code:
    """Code of both halves, and the sizes that it was counted for.

    Attributes:
        run: takes the graph's inputs.
        halves: what it was made of.
        step: whose it is.
        symbols: the symbols among its inputs, by position.
        served: sizes at which the budget is kept.
        refused: sizes at which it is not.
    """

    run: Callable[..., Any]
    halves: Halves
    step: SymbolicTraining
    symbols: Mapping[int, Any]
    served: list[Sizes] = dataclasses.field(default_factory=list)
    refused: list[Sizes] = dataclasses.field(default_factory=list)

    def count_for(self, args: Sequence[Any]) -> None:
        """Count what the code takes with these inputs, where they are larger than before.

        Raises:
            SizesError: the budget is not kept at their sizes.
        """
        sizes = {symbol: args[place] for place, symbol in self.symbols.items()}
        within = _within if self.step.grows else operator.eq
        if not any(within(sizes, known) for known in self.served):
            if any(within(known, sizes) for known in self.refused):
                raise SizesError(self.step.not_kept(sizes), others=True)
            try:
                self.step.grow(self.halves, sizes)
            except SizesError:
                self.refused.append(sizes)
                raise
            self.served.append(sizes)


def _within(sizes: Sizes, known: Sizes) -> bool:
    """Whether no size is larger than it is there."""
    return all(size <= known[symbol] for symbol, size in sizes.items())
