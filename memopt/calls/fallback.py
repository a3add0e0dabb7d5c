"""Calls that memopt failed at: without a budget the model runs eagerly, with one it is refused in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.calls.failures import Failure
from memopt.calls.own_errors import OwnErrors, unsure_of
from memopt.calls.start import CallStart
from memopt.capture.export import CaptureError
from memopt.memory.attributes import held_tensors
from memopt.options import Options
from memopt.torch_compat import pytree

log = logging.getLogger("memopt")


class Fallback:
    """The calls of one model that failed inside memopt.

    Attributes:
        notes: lines for the user, of calls that run eagerly.
        own_errors: asks the model for what it raises itself.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        """None has failed yet."""
        self._model, self._options = model, options
        self.own_errors = OwnErrors(model)
        self._failed: dict[Any, str] = {}
        self._worked: set[Any] = set()
        self.notes: list[str] = []

    def kind(self, args: Sequence[Any], kwargs: Mapping[str, Any], *others: Any) -> Any:
        """What calls have in common that are compiled alike: kinds of tensors, and everything that is no tensor."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        kind = others, self._model.training, str(spec), tuple(map(_kind_of, leaves))
        if kind not in self._failed and kind not in self._worked:
            self._leave_odd(kind, leaves)
        return kind

    def before(
        self, kind: Any, args: Any, kwargs: Any, *, anew: bool = False, written: Collection[int] | None = None
    ) -> CallStart:
        """What such a call changes, to be kept before it is made; all of it where none like it has worked.

        Args:
            kind: of the call.
            args, kwargs: of the call.
            anew: whether it may have to begin anew though such calls have worked.
            written: what these are known to write to (see `CallStart`).
        """
        if kind in self._worked:
            return CallStart(self._model, (args, kwargs), state=anew, written=written)
        return CallStart(self._model, (args, kwargs), state=True, buffers=True)

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

    def why_failed(self, kind: Any) -> str:
        """The line of such a call that failed before; empty where none did.

        Raises:
            CaptureError: it did, under a budget.
        """
        return self._failed[kind] if self.has_failed(kind) else ""

    def answer(
        self, failure: Failure, kind: Any, before: CallStart, args: Any, kwargs: Any, *, limit: int | None
    ) -> Any:
        """What the model itself returns for a call that failed inside memopt.

        Args:
            failure: what failed.
            kind: of the call.
            before: what there was at its start.
            args, kwargs: of the call.
            limit: the budget in bytes; None: there is none, or it is a fraction of a step that was not seen yet.

        Raises:
            NotCapturedError: there is a budget, and only as it is traced does the model's own code fail.
            CaptureError: there is a budget, or a part of the model had run and cannot be undone.
            Exception: what the model itself raises.
        """
        name = type(self._model).__name__
        budget = self._options.budget is not None
        changed = before.restore()
        restored = not changed
        if restored and not budget:
            outputs = self._model(*args, **kwargs)
        unsure = self.own_errors.raise_own(args, kwargs, limit) if restored and budget else None
        if restored and budget and unsure is None and failure.traced:
            raise failure.not_captured(name)
        report = failure.save(name, self._options)
        if budget or not restored:
            text = f"{name} cannot be held to a budget" if budget else name
            again = (
                "" if restored else f"; {changed} was written to before that, so that the model itself is not called"
            )
            said = failure.said if unsure is None else unsure_of(unsure)
            self._failed[kind] = f"{text}: {said}{again}; {report}"
            raise CaptureError(self._failed[kind]) from unsure
        self._failed[kind] = f"{failure.said}: such calls of {name} run eagerly; {report}"
        log.warning("memopt: %s", self._failed[kind])
        self.notes.append(self._failed[kind])
        return outputs

    def _leave_odd(self, kind: Any, leaves: Sequence[Any]) -> None:
        """Leave calls with a tensor that no graph holds, nor can its bytes be told, among these or the model's own."""
        named = [("an input", leaf) for leaf in leaves]
        named += [*self._model.named_parameters(), *self._model.named_buffers()]
        named += [("a tensor that the model holds", held) for held in held_tensors(self._model)]
        for where, tensor in named:
            odd = next((item for item in _ODD if isinstance(tensor, torch.Tensor) and item[0](tensor)), None)
            if odd is not None:
                self._leave(kind, f"{where} is {odd[1]}", odd[2])
                return

    def _leave(self, kind: Any, why: str, instead: str) -> None:
        """Refuse such calls within a budget, and run them eagerly without one."""
        name = type(self._model).__name__
        if self._options.budget is not None:
            self._failed[kind] = f"{name} cannot be captured: {why}: {instead}, or leave the budget out"
            return
        self._failed[kind] = f"{why}: such calls of {name} run eagerly; {instead} to have them planned"
        log.warning("memopt: %s", self._failed[kind])
        self.notes.append(self._failed[kind])


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        shape = tuple(part.shape for part in leaf.unbind()) if _has_no_shape(leaf) else leaf.shape
        return shape, leaf.dtype, leaf.device, leaf.requires_grad, leaf.layout
    return leaf if isinstance(leaf, bool | int | float | str | type(None)) else type(leaf)


def _has_no_shape(tensor: torch.Tensor) -> bool:
    """Whether it is a nested tensor that no graph takes: a jagged one has symbols for its sizes."""
    return tensor.is_nested and tensor.layout is torch.strided


# Tensors that no graph holds: which, in words, and what to write instead.
_ODD: tuple[tuple[Callable[[torch.Tensor], bool], str, str], ...] = (
    (_has_no_shape, "a nested tensor of strided layout", "make it with layout=torch.jagged"),
    (lambda tensor: tensor.is_mkldnn, "a tensor in oneDNN's layout", "make it plain by to_dense()"),
    (lambda tensor: tensor.is_quantized, "a quantized tensor", "make it plain by dequantize()"),
)
