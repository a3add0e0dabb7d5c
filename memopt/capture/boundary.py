"""Between the user's module and a captured graph: what torch's own capture would make wrong, mended or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.dropouts import without_idle_dropouts
from memopt.capture.identities import as_identical
from memopt.capture.metadata import Expected
from memopt.capture.plain_inputs import plainly
from memopt.capture.returned import views_outside
from memopt.capture.returned_inputs import inputs_outside
from memopt.capture.writes import refuse_lost_writes
from memopt.torch_compat.synthetic_bases import bases_told_rightly

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def at_boundary(backend: Backend, *, check: bool, laid_out: Callable[[], bool] = lambda: False) -> Backend:
    """The Dynamo backend, given graphs that AOTAutograd captures rightly.

    Args:
        backend: makes functions of graphs.
        check: whether what the functions return the first time is compared with what the model returns.
        laid_out: whether the model's weights were laid out anew: its own outputs have other strides then, and the
            functions return those of before.
    """

    @functools.wraps(backend)
    def compiled(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        without_idle_dropouts(graph_module)
        refuse_lost_writes(graph_module)
        expected = Expected(graph_module, strides=not laid_out()) if check else None
        identical = as_identical(graph_module)
        filled, views = inputs_outside(graph_module), views_outside(graph_module)
        with bases_told_rightly():
            run = backend(graph_module, example_inputs)
        whole = plainly(identical(filled(run if views is None else _then(run, views))))
        return whole if expected is None else expected.around(whole)

    return compiled


def _then(run: Callable[..., Any], views: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args: views(run(*args))
