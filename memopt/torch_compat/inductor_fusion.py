"""Which kernels Inductor's scheduler fuses, by a policy of one's own; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import fx
from torch._inductor.choices import InductorChoices as InductorChoices
from torch._inductor.scheduler import BaseSchedulerNode as BaseSchedulerNode
from torch._inductor.scheduler import ExternKernelSchedulerNode as ExternKernelSchedulerNode
from torch._inductor.scheduler import Scheduler as Scheduler
from torch._inductor.virtualized import V


def fused_by(policy: InductorChoices) -> contextlib.AbstractContextManager[Any]:
    """Within: Inductor asks this policy whether two nodes may become one kernel."""
    asked: contextlib.AbstractContextManager[Any] = V.set_choices_handler(policy)
    return asked


def nodes_being_lowered() -> Iterable[fx.Node]:
    """The nodes of the graph that is lowered here, in its order; none where it is not known."""
    graph = V.graph.graph
    return graph.nodes if isinstance(graph, fx.Graph) else ()
