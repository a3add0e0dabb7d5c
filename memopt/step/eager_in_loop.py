"""What eager takes in a step of captured graphs, moment by moment, in a loop that was seen around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memopt.step.graph_peaks import GraphPeaks, between_graphs, step_peak
from memopt.step.loop_bytes import Loop


def eager_in_loop(
    graphs: Sequence[GraphPeaks],
    loop: Loop,
    *,
    between: int = 0,
    beside: int = 0,
    most: int | None = None,
    kept: int = 0,
) -> int:
    """The most bytes above what is resident.

    Args:
        graphs: of the step, in order, as eager runs them.
        loop: what it held around them.
        between: bytes that eager regions hold between the graphs, at most.
        beside: bytes that those hold while a graph runs.
        most: bytes that eager takes in forward or in backward at most, where that is known of the whole step.
        kept: bytes that stay in backward where graphs are kept for another one.
    """
    forward = [dataclasses.replace(graph, backward=0) for graph in graphs]
    backward = [dataclasses.replace(graph, forward=0) for graph in graphs]
    if loop.alone and len(graphs) == 1 and graphs[0].alone is not None:
        backward = [dataclasses.replace(backward[0], backward=graphs[0].alone)]
    with between_graphs(between):
        phases = [beside + step_peak(phase) for phase in (forward, backward)]
    first, second = (phase if most is None else min(phase, most) for phase in phases)
    saved = sum(graph.saved for graph in graphs)
    return max(first + loop.forward, saved + loop.between, second + (kept if loop.kept else 0) + loop.backward)
