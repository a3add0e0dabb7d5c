"""Calls that memopt failed at: without a budget the model runs as it is, with one it is refused in one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.calls.failures import Failure
from memopt.calls.start import CallStart
from memopt.capture.eager_call import eager_call
from memopt.capture.export import CaptureError
from memopt.capture.rehearsal import ledger_for
from memopt.capture.shadow import Shadow
from memopt.common.random_streams import streams_kept
from memopt.memory.cost.table import CostTable
from memopt.memory.hidden import WholeLedger
from memopt.memory.resident import resident_of
from memopt.options import Options
from memopt.step.graph_peaks import step_peak
from memopt.torch_compat import pytree
from memopt.torch_compat.valued_fakes import is_unknown

log = logging.getLogger("memopt")


class Fallback:
    """The calls of one model that failed inside memopt.

    Attributes:
        notes: lines for the user, of calls that run as they are.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        """None has failed yet."""
        self._model, self._options = model, options
        self._failed: dict[Any, str] = {}
        self._worked: set[Any] = set()
        self.notes: list[str] = []

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any], *others: Any) -> Any:
        """What calls have in common that are compiled alike: kinds of tensors, and everything that is no tensor."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        kind = others, self._model.training, str(spec), tuple(map(_kind_of, leaves))
        if any(map(_has_no_shape, leaves)) and kind not in self._failed:
            self._leave(kind, "an input is a nested tensor of strided layout", "make it with layout=torch.jagged")
        return kind

    def before(self, kind: Any, args: Any, kwargs: Any) -> CallStart:
        """What such a call changes, to be kept before it is made; copies only if none like it has worked."""
        new, within = kind not in self._worked, self._options.budget is not None
        return CallStart(self._model, (args, kwargs), state=new, buffers=True, objects=within)

    def works(self, kind: Any) -> None:
        """Such a call has worked."""
        if len(self._worked) < 256:
            self._worked.add(kind)

    def has_worked(self, kind: Any) -> bool:
        """Whether such a call was planned before and has worked."""
        return kind in self._worked

    def has_failed(self, kind: Any) -> bool:
        """Whether such a call failed before: it is not compiled again.

        Raises:
            CaptureError: it did, under a budget.
        """
        line = self._failed.get(kind)
        if line is not None and self._options.budget is not None:
            raise CaptureError(line)
        return line is not None

    def answer(self, failure: Failure, kind: Any, before: CallStart, args: Any, kwargs: Any) -> Any:
        """What the model itself returns for a call that failed inside memopt.

        Raises:
            CaptureError: there is a budget, or a part of the model had run and cannot be undone.
            Exception: what the model itself raises.
        """
        name = type(self._model).__name__
        budget = self._options.budget is not None
        changed = before.restore()
        restored = not changed
        if restored and not budget:
            outputs = self._model(*args, **kwargs)
        elif restored:  # fake tensors do not show every error of an operator: what the model itself raises decides
            self._raise_as_model(args, kwargs)
        report = failure.save(name, self._options)
        if budget or not restored:
            text = f"{name} cannot be held to a budget" if budget else name
            again = (
                "" if restored else f"; {changed} was written to before that, so that the model itself is not called"
            )
            self._failed[kind] = f"{text}: {failure.said}{again}; {report}"
            raise CaptureError(self._failed[kind])
        self._failed[kind] = f"{failure.said}: such calls of {name} run as they are; {report}"
        log.warning("memopt: %s", self._failed[kind])
        self.notes.append(self._failed[kind])
        return outputs

    def _leave(self, kind: Any, why: str, instead: str) -> None:
        """Refuse such calls within a budget, and run them as they are without one."""
        name = type(self._model).__name__
        if self._options.budget is not None:
            self._failed[kind] = f"{name} cannot be captured: {why}: {instead}, or leave the budget out"
            return
        self._failed[kind] = f"{why}: such calls of {name} run as they are; {instead} to have them planned"
        log.warning("memopt: %s", self._failed[kind])
        self.notes.append(self._failed[kind])

    def _is_bounded(self, args: Any, kwargs: Any, peak: int | None) -> bool:
        """Whether so many bytes beside what the model holds are within a budget in bytes."""
        budget = self._options.budget
        if budget is None or budget.bytes is None or peak is None:
            return False
        held = resident_of(self._model, args, kwargs, None, accumulating=True)
        return held.total + peak <= budget.bytes

    def error_of_model(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], ledger: WholeLedger | None = None
    ) -> Exception | None:
        """What the model itself raises for these inputs, on fake tensors: no memory is taken, a ledger counts it."""
        try:
            with streams_kept():
                shadow = Shadow(self._model)
                fake_args, fake_kwargs = shadow.inputs(args, kwargs)
                with shadow.mode, ledger or contextlib.nullcontext():
                    shadow.model(*fake_args, **fake_kwargs)
        except Exception as error:
            return error
        return None

    def _raise_as_model(self, args: Any, kwargs: Any) -> None:
        """Raise what the model itself raises; nothing is changed if it raises nothing.

        Fake tensors do not show every error of an operator: the model runs where its step is known to keep the budget.
        """
        own = self.error_of_model(args, kwargs)
        if is_unknown(own):
            own = None
        # Up to where it fails it takes what forward does; operators word an error better than their fakes.
        peak = self._step_bytes(args, kwargs) if own is None else self._forward_bytes(args, kwargs)
        if self._is_bounded(args, kwargs, peak):
            unchanged = _unchanged(self._model, (args, kwargs))
            with unchanged, torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
                self._model(*args, **kwargs)
        if own is not None:
            raise own

    def _step_bytes(self, args: Any, kwargs: Any) -> int | None:
        """The most bytes that a step of the model makes, on fake tensors; None where that is not known."""
        budget = self._options.budget
        table = CostTable(ceiling_bytes=None if budget is None else budget.bytes)
        seen = eager_call(self._model, args, kwargs, table, backward=torch.is_grad_enabled())
        return None if seen is None or seen.by_chance else step_peak([seen.peaks])

    def _forward_bytes(self, args: Any, kwargs: Any) -> int | None:
        """The most bytes that the model makes before it returns or fails, without gradients, on fake tensors."""
        ledger = ledger_for(self._model)
        if ledger is None:
            return None
        with torch.no_grad():
            self.error_of_model(args, kwargs, ledger)
        return ledger.peak


@contextlib.contextmanager
def _unchanged(model: nn.Module, inputs: Any) -> Iterator[None]:
    before = CallStart(model, inputs, state=True, buffers=True)
    try:
        yield
    finally:
        before.restore()


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape = tuple(part.shape for part in leaf.unbind()) if _has_no_shape(leaf) else leaf.shape
        return shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else type(leaf)


def _has_no_shape(leaf: Any) -> bool:
    """Whether it is a nested tensor that no graph takes: a jagged one has symbols for its sizes."""
    return isinstance(leaf, torch.Tensor) and leaf.is_nested and leaf.layout is torch.strided
