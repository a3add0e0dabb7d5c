"""Which calls are captured with symbolic sizes, and which are planned by their own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from memopt.calls.guard_fast_path import Kind
from memopt.compilation.session import Session
from memopt.memory.distributed import has_group
from memopt.options import Options
from memopt.step.call_sizes import Call, CallSizes, call_of
from memopt.torch_compat.static_shapes import Varying

log = logging.getLogger("memopt")

# After so many sizes that were planned each by itself the user is told what to do.
_MANY = 8


@dataclasses.dataclass(frozen=True)
class Symbolic:
    """A call that is to be captured with symbols.

    Attributes:
        call: which one.
        varying: the sizes that are symbols; None: all.
    """

    call: Call
    varying: Varying | None


class Sizing:
    """Decides for the calls of one model."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        """Nothing was called yet."""
        self._model, self._options = model, options
        self._sizes = CallSizes()
        self._all = bool(options.dynamic)  # whether all sizes are symbols
        self._said: set[str] = set()
        self._last: Call | None = None  # without gradients

    def forget(self) -> None:
        """All is planned anew: what was planned by its own sizes may have symbols now."""
        self._sizes = CallSizes()

    def of(self, kind: Kind, session: Session, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Symbolic | None:
        """The symbols of a call that is about to be compiled, or goes the long way; None: it has none.

        Args:
            kind: of call.
            session: of that kind.
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
        """
        if self._options.dynamic is False:
            return None
        call, last = call_of(self._model.training, args, kwargs), self._last
        self._last = None if kind.gradients else call.without_tensors()
        if kind.gradients and self._options.dynamic:
            return Symbolic(call.without_tensors(), None) if self._all else None
        against = self._against(kind, session)
        if against:
            self._sizes.plan_apart(kind.plan, call)
            self._advise(session, call, against)
            return None
        fixed = session.budget is None or session.budget.bytes is not None or session.reference.training is not None
        varying = self._sizes.varying(kind.plan, call, at_once=fixed, after=None if kind.gradients else last)
        return None if varying is None else Symbolic(call.without_tensors(), varying)

    def _against(self, kind: Kind, session: Session) -> str:
        """Why no calls of a kind have symbols, unless all are asked for; empty: they may."""
        if not kind.gradients:
            if not self._options.engine.many_sizes:
                return f"backend {self._options.engine.name!r} makes no code for many sizes"
            if session.broken or session.layout.contiguous or self._options.allow:
                return "it has several graphs, or weights that were folded or laid out anew"
            return "the passes are the user's own" if self._options.passes is not None else ""
        if not kind.alone or session.broken or not (session.step is None or session.one_graph) or has_group():
            return "a step of several graphs, calls or processes shares its budget among them"
        if session.early is not None and session.early.hooked.early:
            return "gradients are handed over within backward"
        if not self._options.engine.many_sizes:
            return f"backend {self._options.engine.name!r} makes no code for many sizes"
        return "the passes are the user's own" if self._options.passes is not None else ""

    def planned(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Such a call was planned by its own sizes before there was any."""
        if kind.gradients:
            self._sizes.plan_apart(kind.plan, call_of(self._model.training, args, kwargs))

    def outgrown(self, kind: Kind, session: Session, symbolic: Symbolic, reason: str, *, others: bool) -> bool:
        """Code for many sizes does not serve a call, which was planned by its own sizes, or is about to be.

        Args:
            kind: of call.
            session: of that kind.
            symbolic: what was to be symbols.
            reason: why, in words.
            others: whether it serves calls of other sizes.

        Returns:
            Whether such code is of no more use.
        """
        line = f"sizes are planned each by itself: {reason}"
        if line not in self._said:
            self._said.add(line)
            log.log(
                logging.WARNING if self._options.dynamic else logging.INFO, "memopt: %s: %s", session.model_name, line
            )
            session.note(line)
        if self._options.dynamic and kind.gradients:
            self._all &= others
            return not others
        if others:
            self._sizes.plan_apart(kind.plan, symbolic.call)
        else:
            self._sizes.never(symbolic.call, reason)
        self._advise(session, symbolic.call, reason)
        return False

    @property
    def many(self) -> bool:
        """Whether many sizes were planned each by itself."""
        return "" in self._said

    def _advise(self, session: Session, call: Call, reason: str) -> None:
        """Say once what to do where many sizes are planned each by itself."""
        if self._sizes.apart(call) == _MANY and "" not in self._said:
            self._said.add("")
            line = f"{_MANY} sizes of input were planned each by itself ({reason}): pad the inputs to few sizes"
            log.warning("memopt: %s: %s", session.model_name, line)
            session.note(line)
