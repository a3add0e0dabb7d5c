"""Between the user's module and a captured graph: what torch's own capture would make wrong, mended or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.returned import views_outside
from memopt.capture.writes import refuse_lost_writes

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def at_boundary(backend: Backend) -> Backend:
    """The Dynamo backend, given graphs that AOTAutograd captures rightly."""

    @functools.wraps(backend)
    def compiled(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        refuse_lost_writes(graph_module)
        views = views_outside(graph_module)
        run = backend(graph_module, example_inputs)
        return run if views is None else lambda *args: views(run(*args))

    return compiled
