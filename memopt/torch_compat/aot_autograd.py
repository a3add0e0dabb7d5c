"""AOTAutograd for a backend of one's own, and its settings; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends import common
from torch._functorch import config

from memopt.torch_compat.gradients_let_go import let_gradients_go
from memopt.torch_compat.log_suppression import unread_logs_suppressed


def aot_autograd(**compilers: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """What lowers a graph of Dynamo's with these compilers, as torch takes them; no graph is printed for nobody."""
    let_gradients_go()
    lower = common.aot_autograd(**compilers)

    def quiet(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with unread_logs_suppressed():
            lowered: Callable[..., Any] = lower(graph_module, example_inputs)
        return lowered

    return quiet


def aot_settings(**settings: Any) -> contextlib.AbstractContextManager[Any]:
    """Within: these settings of `torch._functorch.config`."""
    patch: contextlib.AbstractContextManager[Any] = config.patch(**settings)
    return patch


def set_activation_budget(fraction: float) -> None:
    """Have torch.compile save at most this fraction of what its min-cut would, from now on in this process."""
    config.activation_memory_budget = fraction


def merges_equal_nodes() -> bool:
    """Whether AOTAutograd merges what a joint graph computes twice."""
    return bool(config.cse)


def has_joint_pass() -> bool:
    """Whether a pass of the user's own rewrites joint graphs."""
    return getattr(config, "joint_custom_pass", None) is not None


def checkpoints_draw() -> contextlib.AbstractContextManager[Any]:
    """Within: a graph without gradients may have checkpoints that draw random numbers, which AOTAutograd refuses else.

    It looks there for backward passes of the graph's own, which Dynamo leaves out of graphs.
    """
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    return aot_settings(**{name: False}) if hasattr(config, name) else contextlib.nullcontext()
