"""Whether a call that memopt failed at is one that the model itself fails at.

Fake tensors do not behave as real ones everywhere: what a model raises on them is its own error only if it raises one
when it runs eagerly. So it is run, where that is known to keep the budget, and no further than its fakes came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.calls.start import CallStart
from memopt.capture.eager_call import eager_call
from memopt.capture.rehearsal import ledger_for
from memopt.capture.shadow import Shadow
from memopt.common.random_streams import streams_kept
from memopt.errors import first_line
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import resident_of
from memopt.step.graph_peaks import step_peak
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.valued_fakes import is_unknown


class OwnErrors:
    """Asks one model for the errors that it raises itself."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is asked yet."""
        self._model = model

    def on_fakes(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *modes: contextlib.AbstractContextManager[Any]
    ) -> Exception | None:
        """What the model raises for these inputs on fake tensors, within these modes: no memory is taken."""
        try:
            with streams_kept():
                shadow = Shadow(self._model)
                fake_args, fake_kwargs = shadow.inputs(args, kwargs)
                with shadow.running(), contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    shadow.model(*fake_args, **fake_kwargs)
        except Exception as error:
            return None if is_unknown(error) else error
        return None

    def raise_own(self, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int | None) -> Exception | None:
        """Raise what the model itself raises, where running it is known to keep the limit; nothing else is changed.

        Args:
            args, kwargs: of the call.
            limit: bytes that there may be with all that is resident; None: a share of a step that was not seen yet. A
                call that fails is no such step, and its run takes no more than eager's.

        Returns:
            What fake tensors raise of which it is not known whether the model does: it could not be run.
        """
        error = self.on_fakes(args, kwargs)
        if error is None:
            # Fake tensors do not show every error of an operator.
            if self._is_within(limit, args, kwargs, self._step_bytes(args, kwargs, limit)):
                self._run(args, kwargs, contextlib.nullcontext())
            return None
        # Up to where it fails it takes what forward does; operators word an error better than their fakes.
        operators, ledger = _Operators(), ledger_for(self._model)
        with torch.no_grad():
            self.on_fakes(args, kwargs, operators, *([] if ledger is None else [ledger]))
        if not self._is_within(limit, args, kwargs, None if ledger is None else ledger.peak):
            return error
        self._run(args, kwargs, _Operators(most=operators.count))
        return None

    def _run(self, args: Any, kwargs: Any, mode: contextlib.AbstractContextManager[Any]) -> None:
        before = CallStart(self._model, (args, kwargs), state=True, buffers=True)
        try:
            with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError, _Beyond), mode:
                self._model(*args, **kwargs)
        finally:
            before.restore()

    def _is_within(self, limit: int | None, args: Any, kwargs: Any, peak: int | None) -> bool:
        """Whether so many bytes beside what the model holds are within the limit."""
        if limit is None or peak is None:
            return peak is not None
        return resident_of(self._model, args, kwargs, None, accumulating=True).total + peak <= limit

    def _step_bytes(self, args: Any, kwargs: Any, limit: int | None) -> int | None:
        """The most bytes that a step of the model makes, on fake tensors; None where that is not known."""
        seen = eager_call(self._model, args, kwargs, CostTable(ceiling_bytes=limit), backward=torch.is_grad_enabled())
        return None if seen is None or seen.by_chance else step_peak([seen.peaks])


def unsure_of(error: Exception) -> str:
    """The start of a refusal for what only fake tensors are known to raise; what goes on is for one of memopt's own."""
    raised = f"{type(error).__name__}: {first_line(error)}"
    return f"on fake tensors it raises {raised}: if it does not as it is, memopt failed"


class _Beyond(BaseException):
    """A run has come further than it was to."""


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that begin, and stops a run that begins more than so many."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._most = 0, most

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator unless that is one too many."""
        self.count += 1
        if self._most is not None and self.count > self._most:
            raise _Beyond
        return func(*args, **(kwargs or {}))
