"""A training step lowered once for many sizes: Inductor's code of a joint graph whose sizes are symbols.

Torch's own partitioner cuts the graph. The code's wrapper, run on fake tensors, tells what it takes at any sizes: those
that were counted for run at once, and smaller ones where every tensor is smaller then; others are counted first, and
planned by themselves where they would be over the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from memopt.capture.at_sizes import at_sizes
from memopt.capture.dynamo import Hooks
from memopt.capture.joint import Halved
from memopt.common.phases import phase
from memopt.engine import ManySizes
from memopt.inductor.halves import Halves
from memopt.inductor.own_cut import save_overwritten
from memopt.inductor.partition import Partition, compile_training
from memopt.inductor.served_sizes import ServedSizes, sizes_errors
from memopt.inductor.warm_sizes import WarmSizes
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.memory.distributed import has_group
from memopt.program import Program
from memopt.step.rewriting import Rewriting
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.min_cut import min_cut
from memopt.torch_compat.symbols import Sized, Sizes, grows_everywhere, hints_of


class SymbolicTraining:
    """One graph's lowering for many sizes."""

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Take a Dynamo graph whose sizes are symbols, its inputs, and what makes a program of its joint graph."""
        self.graph_module, self.example_inputs, self.hooks = graph_module, example_inputs, hooks
        self.session: Any = hooks.session
        self._halves = Halves(hooks.backward)
        self._joint: tuple[fx.GraphModule, int] | None = None  # with symbols, and how many outputs forward has
        self._sizes = ServedSizes(hooks, example_inputs)
        self._step: Any = None  # the session's, as the code was counted last
        self._loaded = False  # whether its kernels are
        self._warm = WarmSizes(graph_module, example_inputs, hooks)

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
        with sizes_errors():
            sizes = hints_of(self.example_inputs)
            run = self._warm.found(sizes, self._sizes)
            if run is None:
                with self._alone():
                    run = self._lowered(sizes)
                self._warm.lowered(self._halves)
                self._warm.remember(sizes, self._sizes)
            self._step = session.step
        self.example_inputs = ()  # they are the caller's to let go of
        return ManySizes(self.count_for, run)

    def count_for(self, args: Sequence[Any]) -> None:
        """Count what the code takes with these inputs of the graph, unless sizes that it was counted for cover them.

        Raises:
            SizesError: the budget is not kept at their sizes.
        """
        sizes = self._sizes.of(args)
        if self._sizes.kept(sizes):
            step = self.session.step
            if step is None or self._step is None or step.keys != self._step.keys:
                self.session.step = self._step  # another size was planned since, by itself
            self._load()
            return
        if self._sizes.refused(sizes):
            raise self._sizes.not_kept(sizes)
        if self._warm.runs:
            self._warm.take_up(sizes, self._sizes)
            self._step = self.session.step
            return
        try:
            self._count_more(sizes)
        except SizesError:
            self._sizes.refuse(sizes)
            self._warm.remember(sizes, self._sizes)
            raise
        self._sizes.keep(sizes)
        self._warm.remember(sizes, self._sizes)
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
            self._sizes.grows = grows_everywhere(joint)
            save_overwritten(joint, self._planned(sizes).mutated)
            with phase("cutting"):
                return min_cut(joint, joint_inputs, **options)

        before = self.session.step
        attempt = self._warm.attempt()
        run = compile_training(
            self.graph_module, self.example_inputs, self._halves.compile, Partition(cut), cached=attempt
        )
        if self._excess(sizes) > 0:  # kernels are compiled for sizes that it serves, if such come
            self._sizes.refuse(sizes)
            self.session.step = before
        else:
            self._sizes.keep(sizes)
            self._load()
        self.hooks.recomputed, self.hooks.in_part = self._halves.recomputed, self._halves.in_part
        return run  # type: ignore[no-any-return]

    def _load(self) -> None:
        """Compile and load the kernels, unless they are there."""
        if not self._loaded and not self._warm.runs:
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
        with sizes_errors(), phase("replaying code"):
            peaks = self._halves.at(Sized(sizes)).peaks(captured, MeasuredWorkspace(self.session.table))
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
                raise self._sizes.not_kept(sizes)
