"""Hugging Face's Trainer: `Trainer(…, callbacks=[MemoptCallback(budget="20GB")])`.

`Trainer(model=memopt.compile(model, …))` works as well. The callback knows more: the optimizer that the Trainer makes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import Any

from torch import nn

from memopt.budget import parse_budget
from memopt.in_place import compile_in_place, stand_in_of, undo
from memopt.integrations.training_report import TrainingReport
from memopt.module import CompiledModule
from memopt.report.record import Report
from memopt.report.scalars import scalars

try:
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError("memopt.integrations.hf needs transformers and accelerate: pip install memopt[train]") from error

log = logging.getLogger("memopt")

# Each new token is a call of new shapes, which would be planned for that one call.
_EAGER_METHODS = ("generate",)


class MemoptCallback(TrainerCallback):
    """Compiles the Trainer's model within a budget when training begins, with the optimizer that the Trainer made.

    The model is compiled in place: the Trainer goes on with the object that it was given, and training, evaluation and
    prediction keep the budget from then on, after `train` as well. `generate` runs the model as it is. A model that is
    memopt's stand-in already keeps what it was compiled with and gets the optimizer. Where the Trainer reports to
    TensorBoard or the like, memory and plan go there as scalars, `memopt/measured_peak_bytes` say.
    """

    def __init__(self, budget: str | int | float | None = None, **options: Any) -> None:
        """Say what `memopt.compile` is to be given; nothing is compiled yet.

        Args:
            budget: as `memopt.compile` takes it.
            options: as `memopt.compile` takes them, but for the optimizer.

        Raises:
            TypeError: an optimizer is given.
            ValueError: the budget is not understood.
        """
        if "optimizer" in options:
            raise TypeError("MemoptCallback counts the Trainer's own optimizer: leave optimizer")
        if budget is not None:
            parse_budget(budget)
        self.budget, self.options = budget, options
        self._model: nn.Module | None = None
        self._logged: dict[str, float] = {}
        self._report = TrainingReport()

    @property
    def report(self) -> Report:
        """What was done for the largest training step; for evaluation where none was taken.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        stand_in = None if self._model is None else _stand_in(self._model)
        if stand_in is None:
            raise RuntimeError("nothing is compiled yet: training has not begun")
        return self._report.of(stand_in)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model, or count the optimizer of this training from now on."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        stand_in = _stand_in(model)
        if stand_in is None or (model is not self._model and not isinstance(model, CompiledModule)):
            compile_in_place(model, self.budget, eager_methods=_EAGER_METHODS, optimizer=optimizer, **self.options)
        else:
            stand_in.set_optimizer(optimizer)
        self._model, self._report = model, TrainingReport()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at what was planned for the batch."""
        stand_in = None if self._model is None else _stand_in(self._model)
        if stand_in is not None:
            self._report.see(stand_in)

    on_step_end = on_substep_end

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand memory and plan to where the Trainer's logs go, when they are others than before."""
        with contextlib.suppress(RuntimeError):  # no step was taken
            figures = {f"memopt/{name}": value for name, value in scalars(self.report).items()}
            if figures != self._logged:
                self._logged = figures
                for each in _reporters(args):
                    each.on_log(args, state, control, **{**kwargs, "logs": dict(figures)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what was done, by the logger "memopt"."""
        with contextlib.suppress(RuntimeError):  # no step was taken
            log.info("%s", self.report)

    def undo(self) -> None:
        """The model is as it was before training: its calls keep no budget."""
        if self._model is not None and not isinstance(self._model, CompiledModule):
            undo(self._model)


def _reporters(args: Any) -> list[TrainerCallback]:
    """The callbacks that hand logs on, TensorBoard's say, of the Trainer whose event this is.

    An event tells a callback nothing of the others: they are asked of the handler that is calling.
    """
    frame = inspect.currentframe()
    kinds = tuple(get_reporting_integration_callbacks(args.report_to))  # type: ignore[no-untyped-call]
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            return [each for each in handler.callbacks if isinstance(each, kinds)]
        frame = frame.f_back
    return []


def _stand_in(model: nn.Module) -> CompiledModule | None:
    return model if isinstance(model, CompiledModule) else stand_in_of(model)
