"""A training step's code for many sizes from an earlier process, and what is kept of it for later ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.dynamo import Hooks, compilation_of
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.joint_cache import JointCache
from memopt.inductor.recalled import digest_of, recalled
from memopt.inductor.served_sizes import ServedSizes
from memopt.step.sizes_apart import MadeAnewError
from memopt.step.warm_sizes import CountedSizes
from memopt.step.warm_start import facts_of, finished_step, may_be_alone
from memopt.torch_compat.symbols import Sizes


class WarmSizes:
    """One graph's place on disk.

    Attributes:
        runs: whether code of an earlier process runs, which is counted at no other sizes than it was there.
    """

    def __init__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> None:
        """Nothing is looked for yet."""
        self._graph_module, self._example_inputs, self._hooks = graph_module, example_inputs, hooks
        self._session = compilation_of(hooks)
        self._cache = JointCache()
        self._counted: CountedSizes | None = None  # of the code that runs
        self._there = ""  # digest of the code on disk
        self._entry: Any = None  # of torch's cache, until it is written
        self.runs = False

    def found(self, sizes: Sizes, served: ServedSizes, *, planned: bool) -> Callable[..., Any] | None:
        """The code of an earlier process, where it is known what it takes at these sizes; the session stands with it.

        Args:
            sizes: of this call.
            served: learns them.
            planned: whether it is made by a plan.

        Raises:
            SizesError: it is known to be over the budget at them.
        """
        graph_module, inputs, hooks, session = self._graph_module, self._example_inputs, self._hooks, self._session
        self._example_inputs = ()
        if not may_be_alone(session, hooks):
            return None
        facts = facts_of(session, many_sizes=True) + (b", planned" if planned else b"")
        code = recalled(graph_module, inputs, hooks, self._cache, facts)
        hooks.is_known_as(self._cache.key)
        if code is None:
            return None
        self._there = digest_of(code.forward, code.backward)
        if not self._there or hooks.key in session.not_recalled:
            return None
        self._counted = CountedSizes(hooks.key, self._there)
        served.grows = self._counted.grows
        for each in self._counted.known_to_be_over():
            with contextlib.suppress(ValueError):
                served.refuse(served.named(each))
        if served.refused(sizes):
            raise served.not_kept(sizes)
        if not self._takes_up(sizes, served):
            served.forget()
            return None
        self.runs = True
        return code.run

    def take_up(self, sizes: Sizes, served: ServedSizes) -> None:
        """Let the session stand as where the code that runs was counted.

        Raises:
            MadeAnewError: it was not, at these sizes or larger ones.
        """
        if not self._takes_up(sizes, served):
            self._session.not_recalled.add(self._hooks.key)
            raise MadeAnewError("what code of an earlier process takes at these sizes is not known")

    def _takes_up(self, sizes: Sizes, served: ServedSizes) -> bool:
        assert self._counted is not None
        kept = self._counted.take_up(self._session, self._hooks, served.listed(sizes))
        if kept:
            served.keep(sizes)
        return kept

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Within: what is made of the graph is remembered."""
        return self._cache.attempt()

    def lowered(self, graphs: ForwardBackward) -> None:
        """The graph was lowered in this process."""
        self._entry = self._cache.latest_entry()
        code = digest_of(graphs.forward, graphs.backward)
        waits = graphs.forward is None or graphs.forward.waiting
        self._counted = CountedSizes(self._hooks.key, code) if self._entry and code and not waits else None
        if code == self._there:
            self._entry = None  # it is on disk

    def remember(self, sizes: Sizes, served: ServedSizes) -> None:
        """Keep what was found at these sizes for other processes."""
        session, program, listed = self._session, self._hooks.captured, served.listed(sizes)
        if self._counted is None or program is None or not self._hooks.key:
            return
        if not served.kept(sizes):
            self._counted.refuse(listed, grows=served.grows)
            return
        step = session.step
        if step is None or step.limit is None or session.report is None or not step.planned:
            return
        settlement = finished_step(session, self._hooks, program)
        if self._counted.keep(listed, settlement, grows=served.grows) and self._entry is not None:
            entry, self._entry = self._entry, None
            self._cache.write(entry, alone=bool(self._there))
