"""Lightning's Trainer: `L.Trainer(callbacks=[Memopt(budget="20GB")])`, for `lightning` and `pytorch_lightning`.

`trainer.fit(memopt.compile(module, budget="20GB"))` does the same: a LightningModule's stand-in brings the callback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memopt.api import compile
from memopt.budget import OutOfBudgetError, parse_budget
from memopt.in_place import compile_together_in_place, derived, stand_in_of, undo
from memopt.integrations.training_report import TrainingReport
from memopt.memory.optimizers import count, holds_some, listed
from memopt.memory.resident import storage_bytes
from memopt.module import CompiledModule, calls_of
from memopt.report.record import Report
from memopt.report.scalars import scalars

log = logging.getLogger("memopt")

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# What Lightning's search for a batch that fits looks for in an error, and in no other words.
_OUT_OF_MEMORY = "(To Lightning: CUDA out of memory.)"
# Strategies that keep the whole model on each device.
_WHOLE = ("SingleDeviceStrategy", "DDPStrategy")


def _callback_class() -> Any:
    """The Callback of the library that is imported already, else of the one that is installed."""
    for name in (*(name for name in _LIBRARIES if name in sys.modules), *_LIBRARIES):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).Callback
    raise ImportError("memopt.integrations.lightning needs Lightning: pip install memopt[lightning]")


class Memopt(_callback_class()):  # type: ignore[misc]
    """Compiles a LightningModule in place, with the optimizers of its `configure_optimizers`, when a run begins.

    Its steps are compiled whole (training, validation, test and prediction), the loss and what they do around the
    networks included; what a step logs is logged after it. Each of its modules that has parameters is compiled on its
    own instead with manual optimization, where a step holds backward and the optimizers' steps, and from the step on
    in which an integer that the step reads (the batch's number, a counter) has changed, as each value would be compiled
    for. Every `log_every_n_steps` steps the loggers get memory and plan as scalars, `memopt/measured_peak_bytes` say.
    """

    def __init__(self, budget: str | int | float | None = None, **options: Any) -> None:
        """Say what `memopt.compile` is to be given; nothing is compiled yet.

        Args:
            budget: as `memopt.compile` takes it; for several modules with manual optimization no fraction.
            options: as `memopt.compile` takes them, but for the optimizer.

        Raises:
            TypeError: an optimizer is given.
            ValueError: the budget is not understood.
        """
        if "optimizer" in options:
            raise TypeError("Memopt counts what configure_optimizers makes: leave optimizer")
        if budget is not None:
            parse_budget(budget)
        self.budget, self.options = budget, options
        self._module: nn.Module | None = None
        self._report = TrainingReport()

    @property
    def report(self) -> Report:
        """What was done for the largest training step; of several modules that of the first which was called.

        Raises:
            RuntimeError: nothing was compiled yet.
        """
        for stand_in in self._stand_ins():
            with contextlib.suppress(RuntimeError):
                return self._report.of(stand_in)
        raise RuntimeError("nothing is compiled yet: no step was taken")

    def undo(self) -> None:
        """The module is as it was before: its steps keep no budget."""
        if self._module is not None:
            _undo(self._module)

    # -- Lightning's events --------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come before the other callbacks: those that look for a rate or a batch take steps when a run begins."""
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile the module, or count the optimizers of this run from now on."""
        self._begin(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile the module if it was not yet."""
        self._begin(trainer, pl_module, again=False)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log memory and plan, and compile modules where the step as a whole would be compiled again and again."""
        whole = None if self._module is None else stand_in_of(self._module)
        if whole is not None:
            self._report.see(whole)
        if trainer.loggers and (trainer.global_step == 1 or trainer.global_step % trainer.log_every_n_steps == 0):
            with contextlib.suppress(RuntimeError):  # no step was compiled
                figures = {f"memopt/{name}": value for name, value in scalars(self.report).items()}
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=trainer.global_step)
        module = self._module
        if module is not None and whole is not None and self._as_parts(module) and _reads_counters(whole):
            self._report = TrainingReport()
            self._compile_parts(module, trainer.optimizers)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what was done, by the logger "memopt"."""
        with contextlib.suppress(RuntimeError):
            log.info("%s", self.report)

    # -- what is compiled ----------------------------------------------------------------------------------------

    def _begin(self, trainer: Any, pl_module: Any, *, again: bool = True) -> None:
        module = calls_of(pl_module).model if isinstance(pl_module, CompiledModule) else pl_module
        compiled = module is self._module and any(True for _ in self._stand_ins())
        whole = module.automatic_optimization and (not compiled or stand_in_of(module) is not None)
        if compiled and not again:
            return
        bases = {base.__name__ for base in type(trainer.strategy).__mro__}
        if bases.isdisjoint(_WHOLE) or any("DeepSpeed" in name for name in bases):
            raise TypeError(
                f"{type(trainer.strategy).__name__} splits the model: memopt plans for one device, or strategy='ddp'"
            )
        optimizers = list(trainer.optimizers)
        self._module, self._report = module, TrainingReport()
        if whole:
            stand_in = stand_in_of(module) if compiled else None
            if stand_in is None:
                _compile_steps(
                    module, lambda steps: compile(steps, self.budget, optimizer=optimizers or None, **self.options)
                )
            else:
                stand_in.set_optimizer(optimizers or None)
        else:
            self._compile_parts(module, optimizers)

    def _as_parts(self, module: nn.Module) -> bool:
        """Whether a LightningModule's modules can be compiled each on its own: no fraction of a whole is known then."""
        limit = None if self.budget is None else parse_budget(self.budget)
        return limit is None or limit.bytes is not None or len(list(_parts(module))) == 1

    def _compile_parts(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Compile the modules of a LightningModule that have parameters, in place, within one budget."""
        parts, budget = list(_parts(module)), self.budget
        if not self._as_parts(module):
            raise ValueError(
                f"budget {budget}: {type(module).__name__} optimizes {len(parts)} modules by hand, "
                "of which no one peak is known: say it in bytes, as '20GB'"
            )
        if budget is not None and not parts:
            raise TypeError(
                f"{type(module).__name__} optimizes by hand and holds its parameters itself: put them into a module "
                "that its step calls, which keeps the budget then"
            )
        _undo(module)
        own = [part for part in parts if not isinstance(part, CompiledModule)]
        for part in parts:
            if isinstance(part, CompiledModule):
                part.set_optimizer([item for item in optimizers if holds_some(item, list(part.parameters()))] or None)
        if own and budget is not None and (limit := parse_budget(budget).bytes) is not None:
            budget = max(1, limit - _beside(module, own, optimizers))
        trained = [parameter for part in own for parameter in part.parameters()]
        stepping = [item for item in optimizers if holds_some(item, trained)]
        if own:
            compile_together_in_place(own, budget, optimizer=stepping or None, **self.options)

    def _stand_ins(self) -> Iterator[CompiledModule]:
        if self._module is not None:
            for part in (self._module, *_parts(self._module)):
                stand_in = part if isinstance(part, CompiledModule) else stand_in_of(part)
                if stand_in is not None:
                    yield stand_in


def _undo(module: nn.Module) -> None:
    for part in (module, *_parts(module)):
        undo(part)


def callbacks_of(stand_in: CompiledModule, own: Callable[[], Any]) -> Callable[[], list[Any]]:
    """The `configure_callbacks` of a LightningModule's stand-in: the module's own, and the one that compiles it."""

    def configure_callbacks() -> list[Any]:
        given = calls_of(stand_in).options
        budget = None if given.budget is None else given.budget.bytes or given.budget.fraction
        callback = Memopt(budget, backend=given.engine, passes=given.passes, verify=given.verify, allow=given.allow)
        stand_in.__dict__["_memopt_loop"], found = callback, own()
        return [*(found if isinstance(found, (list, tuple)) else [found]), callback]

    return configure_callbacks


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a LightningModule that a step calls: of lists and dicts of modules those in them."""
    for part in module.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(part)
        elif next(part.parameters(), None) is not None:
            yield part


def _beside(module: nn.Module, parts: Sequence[nn.Module], optimizers: Sequence[Any]) -> int:
    """Bytes of what a LightningModule holds beside these of its modules: tensors, gradients, optimizers' state."""
    own = {id(tensor) for part in parts for tensor in (*part.parameters(), *part.buffers())}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in own]
    tensors = [*rest, *(buffer for buffer in module.buffers() if id(buffer) not in own)]
    gradients = storage_bytes([parameter for parameter in rest if parameter.requires_grad])
    steppers = [item for item in optimizers if holds_some(item, rest)]
    state = count(listed(steppers), rest).footprint.state_bytes if steppers else 0
    return storage_bytes(tensors) + gradients + state


def _reads_counters(stand_in: CompiledModule) -> bool:
    """Whether steps were compiled anew for another value of a number that is not in the batch."""
    return any(not name.startswith("L['args'][0]") for name in calls_of(stand_in).sessions.numbers.changed)


# -- steps, whole -----------------------------------------------------------------------------------------------------


class _Steps(nn.Module):
    """The steps of a LightningModule as calls of one module; what they log is returned, to be logged outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        logged: Any = []
        self.module._memopt_logged = logged
        return getattr(self.module, name)(*args, **kwargs), logged


def _compile_steps(module: nn.Module, make: Callable[[nn.Module], CompiledModule]) -> None:
    """From now on the steps of this very module run as planned."""
    _undo(module)
    kind = type(module)
    for name in _STEPS:
        if "dataloader_iter" in inspect.signature(getattr(kind, name)).parameters:
            raise TypeError(f"{kind.__name__}.{name} takes dataloader_iter: memopt plans steps of batches, use batch")
    inner: nn.Module = object.__new__(kind)
    inner.__dict__ = module.__dict__
    seen: nn.Module = object.__new__(derived(kind, inner, {"log": _note_log, "log_dict": _note_log_dict}))
    seen.__dict__ = module.__dict__
    # Reports and messages bear the module's name; Dynamo keeps what it compiled by the code.
    forward = types.FunctionType(_Steps.forward.__code__.replace(), globals(), "forward")
    stand_in = make(type(kind.__name__, (_Steps,), {"forward": forward})(seen))

    def step(name: str) -> Any:
        @functools.wraps(getattr(kind, name))
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                outputs, logged = stand_in(name, *args, **kwargs)
            except OutOfBudgetError as error:
                error.args = (f"{error.args[0]} {_OUT_OF_MEMORY}",)
                raise
            finally:
                self.__dict__.pop("_memopt_logged", None)
            for method, positional, named in logged:
                getattr(self, method)(*positional, **named)
            return outputs

        return run

    module.__class__ = derived(kind, inner, {name: step(name) for name in _STEPS} | {"_memopt_stand_in": stand_in})


def _note_log(self: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    self._memopt_logged.append(("log", (name, _detached(value, kwargs), *args), kwargs))


def _note_log_dict(self: Any, dictionary: Any, *args: Any, **kwargs: Any) -> None:
    if not isinstance(dictionary, nn.Module):  # a MetricCollection
        dictionary = {name: _detached(value, kwargs) for name, value in dictionary.items()}
    self._memopt_logged.append(("log_dict", (dictionary, *args), kwargs))


def _detached(value: Any, options: dict[str, Any]) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and not options.get("enable_graph") else value
