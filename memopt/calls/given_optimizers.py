"""The optimizers that a user gives for a model's calls: replaced later, and counted where their steps show more."""

from __future__ import annotations

import dataclasses
from typing import Any

from memopt.calls.residents import Residents
from memopt.calls.sessions import Sessions
from memopt.options import Options


class GivenOptimizers:
    """What the calls of one model ask of its optimizers, which are the sessions'."""

    def __init__(self, options: Options, sessions: Sessions, residents: Residents) -> None:
        """Of a model with these compilations, whose residents are counted; options: what was asked for beside."""
        self._options, self._sessions, self._residents = options, sessions, residents

    def __bool__(self) -> bool:
        """Whether the loop still has one that was given."""
        return bool(self._sessions.optimizers.given)

    def recount_if_due(self) -> None:
        """Count them anew if a step has shown something; plans that do not keep the budget then are dropped."""
        if self._sessions.optimizers.due():
            self._residents.recount()

    def replace(self, optimizer: Any) -> None:
        """Count this optimizer in place of what was given before; plans that do not keep the budget then are dropped.

        Raises:
            TypeError: it is neither an optimizer, nor several, nor what makes one.
            ValueError: it holds none of the model's parameters that are trained; what was given before stays.
        """
        before = self._sessions.optimizers.given
        self._sessions.optimizers.replace(optimizer)
        self._sessions.group.set_optimizers()
        try:
            self._residents.recount()
        except ValueError:
            self.replace(before or None)
            raise

    def asked_for(self) -> Options:
        """What was asked for, with the optimizers that the loop has by now."""
        return dataclasses.replace(self._options, optimizer=self._sessions.optimizers.given or None)
