"""Calls within something that nothing is compiled through: a transform of torch.func's, a mode of the user's."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from memopt.capture.export import CaptureError

log = logging.getLogger("memopt")


class Transformed:
    """Such calls of one model: it runs eagerly there, unless it has a budget to keep."""

    def __init__(self, model: nn.Module, *, budgeted: bool) -> None:
        """Of a model, which has a budget or none."""
        self._model, self._budgeted = model, budgeted
        self._said: set[str] = set()  # once of each

    def call(self, around: str, args: Any, kwargs: Any) -> Any:
        """Call the model itself.

        Args:
            around: what the call lies in, in words.
            args, kwargs: of the call.

        Raises:
            CaptureError: there is a budget.
        """
        name = type(self._model).__name__
        if self._budgeted:
            raise CaptureError(
                f"{around} is not planned through, so that {name} keeps no budget there: call the original model"
            )
        if around not in self._said:
            self._said.add(around)
            log.info("memopt: within %s %s runs eagerly", around, name)
        return self._model(*args, **kwargs)
