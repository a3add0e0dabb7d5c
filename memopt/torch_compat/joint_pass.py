"""Passes of one's own over Inductor's graphs; tried on 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

_FIRST, _THEN, _LAST = "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass"
_HALF = "post_grad_custom_pre_pass"


class _Edit(CustomGraphPass):
    def __init__(self, edit: Callable[[fx.Graph], None], versions: str) -> None:
        self._edit, self._versions = edit, versions

    def __call__(self, graph: fx.Graph) -> None:
        self._edit(graph)

    def uuid(self) -> Any:
        return f"{self._edit.__module__}.{self._edit.__qualname__}, {self._versions}".encode()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Edit:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Edit, (self._edit, self._versions)


def before_joint_passes(edit: Callable[[fx.Graph], None], versions: str) -> dict[str, Any]:
    """Inductor's settings with which a module's function edits each joint graph first; none where a user has such.

    Args:
        edit: the function.
        versions: what Inductor's cache keeps code for, and for no other: what else this version mends is in the code.
    """
    return _setting(_FIRST, edit, versions)


def after_joint_passes(edit: Callable[[fx.Graph], None], versions: str) -> dict[str, Any]:
    """The same for each joint graph, and each one for inference, when Inductor's own passes have edited it."""
    return _setting(_THEN, edit, versions)


def before_passes_of_graphs(edit: Callable[[fx.Graph], None], versions: str) -> dict[str, Any]:
    """The same for one graph of a step, or a graph for inference, before Inductor's last passes."""
    return _setting(_HALF, edit, versions)


def before_lowering(edit: Callable[[fx.Graph], None], versions: str) -> dict[str, Any]:
    """The same for each graph that is about to be lowered: one graph of a step, or one for inference."""
    return _setting(_LAST, edit, versions)


def _setting(option: str, edit: Callable[[fx.Graph], None], versions: str) -> dict[str, Any]:
    return {option: _Edit(edit, versions)} if hasattr(config, option) and not getattr(config, option) else {}
