"""A training step lowered once for many sizes: Inductor's code of a joint graph whose sizes are symbols.

Torch's own partitioner cuts the graph. The code's wrapper, run on fake tensors, tells what it takes at any sizes: those
that were counted for run at once, and smaller ones where every tensor is smaller then; others are counted first, and
planned by themselves where they would be over the budget.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memopt.capture.at_sizes import at_sizes
from memopt.capture.dynamo import Hooks
from memopt.capture.joint import Halved
from memopt.common.phases import phase
from memopt.engine import ManySizes
from memopt.errors import first_line
from memopt.inductor.halves import Halves
from memopt.inductor.own_cut import save_overwritten
from memopt.inductor.partition import Partition, compile_training
from memopt.inductor.replay import ReplayError
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.distributed import has_group
from memopt.program import Program
from memopt.step.rewriting import Rewriting
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.inductor_errors import InductorError
from memopt.torch_compat.min_cut import min_cut
from memopt.torch_compat.symbols import Sized, Sizes, UnknownSizeError, grows_everywhere, hints_of, symbols_of


class SymbolicTraining:
    """One graph's lowering for many sizes."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph whose sizes are symbols, its inputs, and what makes a program of its joint graph."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session: Any = hooks.session
        self._symbols = symbols_of(example_inputs)
        self._halves = Halves(hooks.backward)
        self._joint: tuple[fx.GraphModule, int] | None = None  # with symbols, and how many outputs forward has
        self._grows = False  # whether larger sizes make every tensor larger
        self._served: list[Sizes] = []  # sizes at which the budget is kept
        self._step: Any = None  # the session's, as the code was counted last
        self._loaded = False  # whether its kernels are
        self._refused: list[Sizes] = []  # sizes at which it is not

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
            with self._alone():
                run = self._lowered(hints_of(self.example_inputs))
            self._step = session.step
        except UnknownSizeError as error:
            raise SizesError(str(error)) from error
        self.example_inputs = ()  # they are the caller's to let go of
        return ManySizes(self.count_for, run)

    def count_for(self, args: Sequence[Any]) -> None:
        """Count what the code takes with these inputs of the graph, unless sizes that it was counted for cover them.

        Raises:
            SizesError: the budget is not kept at their sizes.
        """
        sizes = {symbol: args[place] for place, symbol in self._symbols.items()}
        smaller = within if self._grows else operator.eq
        if any(smaller(sizes, known) for known in self._served):
            if self.session.figures(self.hooks.captured) is None:  # another size was planned since, by itself
                self.session.step = self._step
            self._load()
            return
        if any(smaller(known, sizes) for known in self._refused):
            raise SizesError(self._not_kept(sizes), others=True)
        try:
            self._count_more(sizes)
        except SizesError:
            self._refused.append(sizes)
            raise
        self._served.append(sizes)
        self._step = self.session.step
        self._load()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Within, the session plans nothing, and rewrites nothing: the partition is torch's own."""
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

    def _lowered(self, sizes: Sizes) -> Callable[..., Any]:
        def cut(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Halved:
            self._joint = joint, options["num_fwd_outputs"]
            self._grows = grows_everywhere(joint)
            save_overwritten(joint, self._planned(sizes).mutated)
            with phase("cutting"):
                return min_cut(joint, joint_inputs, **options)

        before = self.session.step
        try:
            run = compile_training(self.graph_module, self.example_inputs, self._halves.compile, Partition(cut))
        except InductorError as error:
            raise SizesError(f"Inductor has no code for this graph with symbolic sizes: {first_line(error)}") from error
        if self._excess(sizes) > 0:  # kernels are compiled for sizes that it serves, if such come
            self._refused.append(sizes)
            self.session.step = before
        else:
            self._served.append(sizes)
            self._load()
        self.hooks.recomputed, self.hooks.in_part = self._halves.recomputed, self._halves.in_part
        return run  # type: ignore[no-any-return]

    def _load(self) -> None:
        """Compile and load the kernels, unless they are there."""
        if not self._loaded:
            with phase("compiling kernels"):
                self._halves.load()
            self._loaded = True

    def _planned(self, sizes: Sizes) -> Program:
        """The step at these sizes as the session plans it, which is as it is."""
        assert self._joint is not None
        joint, outputs = self._joint
        return self.hooks.rewrite(at_sizes(joint, sizes), outputs)

    def _excess(self, sizes: Sizes) -> int:
        """Put on record what code of the step that was planned last takes at these sizes.

        Returns:
            Bytes over the budget; 0 without one.

        Raises:
            SizesError: the code could not be followed.
        """
        captured = self.hooks.captured
        assert captured is not None
        try:
            with phase("replaying code"):
                peaks = self._halves.at(Sized(sizes)).peaks(captured, MeasuredWorkspace(self.session.table))
        except ReplayError as error:
            raise SizesError(f"what code with symbolic sizes takes is not known: {error}") from error
        return self.session.emitted(captured, peaks)[1] or 0

    def _count_more(self, sizes: Sizes) -> None:
        """Plan and count the step at other sizes; where the budget is not kept there, what was known before stands.

        Raises:
            SizesError: it is not kept.
        """
        session, hooks = self.session, self.hooks
        before = session.step, hooks.captured
        with self._alone():
            self._planned(sizes)
            if self._excess(sizes) > 0:
                session.step, hooks.captured = before
                raise SizesError(self._not_kept(sizes), others=True)

    def _not_kept(self, sizes: Sizes) -> str:
        """That the budget is not kept at these sizes, in words."""
        listed = (f"{self.hooks.called(place)} = {sizes[symbol]}" for place, symbol in self._symbols.items())
        return f"code for many sizes does not keep the budget at {', '.join(listed)}"


def within(sizes: Sizes, known: Sizes) -> bool:
    """Whether no size is larger than it is there."""
    return all(size <= known[symbol] for symbol, size in sizes.items())
