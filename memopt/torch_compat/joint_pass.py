"""A pass of one's own over Inductor's joint graphs, before its own passes; tried on 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

_OPTION = "joint_custom_pre_pass"


class _First(CustomGraphPass):
    def __init__(self, edit: Callable[[fx.Graph], None]) -> None:
        self._edit = edit

    def __call__(self, graph: fx.Graph) -> None:
        self._edit(graph)

    def uuid(self) -> Any:
        return f"{self._edit.__module__}.{self._edit.__qualname__}".encode()

    def __deepcopy__(self, memo: dict[int, Any]) -> _First:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _First, (self._edit,)


def before_joint_passes(edit: Callable[[fx.Graph], None]) -> dict[str, Any]:
    """Inductor's settings with which a module's function edits each joint graph first; none where a user has such."""
    return {_OPTION: _First(edit)} if hasattr(config, _OPTION) and not getattr(config, _OPTION) else {}
