"""What eager itself takes in the graphs of a step's calls: a fraction of a budget is of that."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.memory.timeline import Timeline
from memopt.program import Program
from memopt.step.graph_peaks import GraphPeaks, peaks_of, step_peak
from memopt.step.planned import Planned


class EagerPeaks:
    """Of the graphs that a session has met, by fingerprint.

    Attributes:
        lowered: what eager holds in the graph that is being lowered; None where that is not known.
        step: bytes that it holds in the whole step of several graphs, above what is resident; None where not known.
    """

    def __init__(self, known: dict[str, GraphPeaks] | None = None) -> None:
        """Nothing is known yet but of these graphs, which are the same for all sessions of a model."""
        self.lowered: GraphPeaks | None = None
        self.step: int | None = None
        self._known = {} if known is None else known

    def lowers(self, peaks: GraphPeaks) -> None:
        """A graph is being lowered in which eager holds so much."""
        self.lowered = peaks

    def lowered_is(self, key: str) -> None:
        """The graph that is being lowered has this fingerprint."""
        if self.lowered is not None:
            self._known[key] = self.lowered

    def ends(self) -> None:
        """No graph is being lowered."""
        self.lowered = None

    def takes(self, call: GraphPeaks | None) -> None:
        """The whole step of several graphs takes this in eager; None where that could not be counted."""
        self.step = None if call is None else step_peak([call])

    def of(self, key: str, program: Program, timeline: Timeline) -> GraphPeaks:
        """What eager holds in a graph; what this program of it takes, where that is not known."""
        return self._known.get(key) or peaks_of(program, timeline)

    def of_step(self, keys: Sequence[str], default: int, outside: int) -> int:
        """Bytes that eager's step of these graphs peaks at, above what is resident.

        Args:
            keys: their fingerprints.
            default: for where a graph is not known.
            outside: bytes of `step` that are counted apart.
        """
        known = [self._known[key] for key in keys if key in self._known]
        own = step_peak(known) if len(known) == len(keys) else default
        return own if self.step is None else min(own, self.step - outside)

    def of_calls(self, before: Sequence[GraphPeaks], keys: Sequence[str], captured: Sequence[Planned]) -> int:
        """The same of a step of calls before this one, of which eager holds so much, and of these graphs."""
        now = [self.of(key, item.program, item.timeline) for key, item in zip(keys, captured, strict=True)]
        return step_peak([*before, *now])
