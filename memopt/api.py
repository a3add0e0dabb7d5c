"""The calls: compile, plan, estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from memopt.backends.by_name import engine_of
from memopt.budget import format_bytes, parse_budget
from memopt.engine import Engine
from memopt.evidence import Verification
from memopt.memory.breakdown import MemoryBreakdown
from memopt.memory.cost.devices import find
from memopt.memory.optimizer import OptimizerLike
from memopt.memory.optimizers import listed
from memopt.module import CompiledModule, calls_of, compilable
from memopt.options import Options
from memopt.pass_manager import Pass
from memopt.report.record import Report
from memopt.together import compile_together

# Levers that change the numbers or the meaning of a step, by consent only.
LEVERS = ("freeze",)

Key = TypeVar("Key")


@overload
def compile(
    model: nn.Module,
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> CompiledModule: ...


@overload
def compile(
    model: list[nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> list[CompiledModule]: ...


@overload
def compile(
    model: tuple[nn.Module, ...],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> tuple[CompiledModule, ...]: ...


@overload
def compile(
    model: Mapping[Key, nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> dict[Key, CompiledModule]: ...


def compile(
    model: nn.Module | Sequence[nn.Module] | Mapping[Any, nn.Module],
    budget: str | int | float | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
) -> Any:
    """Return the model's stand-in that trains and infers within a memory budget, with the same numbers.

    Args:
        model: any module that torch.compile runs. Several in a list, a tuple or a mapping (generator and discriminator,
            encoder and decoder, teacher and student) share the budget, and their stand-ins come in the same.
        budget: the most bytes that the device may hold during a step, everything counted, other tensors of the process
            too: "20GB" (20·10⁹), "20GiB" (20·2³⁰), a number of bytes; or a fraction in (0, 1] of the step's own
            unconstrained peak. None: memory is reduced only where it costs no time.
        example_inputs: positional arguments as a tuple or list, keyword arguments as a mapping, or one tensor: plan at
            once, without running the model. Without them the first call plans.
        optimizer: what will step the parameters: an optimizer (or what wraps or schedules one), a list of several, or a
            class or function that makes one of a list of parameters. State and temporaries count; it is never stepped
            here. State that a step on fake tensors does not tell (LBFGS) counts after the first step, as that of an
            optimizer which was not given does under a budget; `set_optimizer` of the stand-in gives one later.
        backend: "inductor" for speed, "aten" for a step that is byte for byte what was planned, "static" for inference
            in one arena with no allocation in a call but the results, "onnxruntime" for inference by ONNX Runtime,
            "xla" for executables of XLA's, "tensorflow" for inference by TensorFlow, compiled by XLA; or an engine of
            `memopt.backends` with options of its own. None: "inductor" for training, and for inference "inductor" or
            "static", by measured time under the budget. Where Inductor lays convolutions out channels-last, because it
            is faster, the model's own parameters are laid out so: the same values and objects, with other strides. On
            CUDA weights that multiply the same value are moved into one block, where one product of them is faster.
        passes: rewrites in order, in place of `memopt.INFERENCE` or `memopt.TRAINING`.
        allow: names of levers that may change the numbers. "freeze": for inference, batch norms are folded into the
            model's own parameters and buffers, in place and for good: it computes the same function from other
            numbers, and is to be trained no further.
        verify: True proves each rewrite on its own region, measures a trial step, and compares once what each captured
            graph returns (shapes, strides, dtypes, gradients required, memory shared) with what the model returns on
            fake tensors. "full" also compares whole programs, and at the first call of each graph runs the model
            itself beside the compiled call: outputs, all gradients by random tangents, buffers, attributes, arguments
            and random numbers afterwards, also of backward, and gradients where a loop writes to what it gave or got
            before that. Code that draws other random numbers is compiled once more to draw the model's. That takes
            several times the memory of a step, beyond any budget, and its time. False trusts (but code for a GPU,
            which must keep a budget, is measured all the same).
        dynamic: whether inputs have many sizes. None: the first sizes are planned by themselves; when others come,
            calls are captured with symbols for the sizes that vary, and one compilation serves all within the
            budget. True: training steps so from the first on, with all sizes. False: each size is planned by itself.

    Returns:
        A module with the model's own parameters and state dict keys; `.report` tells what was done.

    Raises:
        BudgetError: no plan keeps the budget (here with `example_inputs`, else at the first call).
        ValueError: the budget, the backend or a lever is not understood.
        TypeError: `model` is no module, `optimizer` none of these, or `passes` holds something that is not a Pass.
    """
    if not isinstance(model, nn.Module) and isinstance(model, (list, tuple, Mapping)):
        if example_inputs is not None:
            raise ValueError("example_inputs are one model's: several are planned in the first step that calls them")
        shared: dict[str, Any] = {"backend": backend, "passes": passes, "allow": allow, "verify": verify}
        shared |= {"budget": budget, "dynamic": dynamic}
        return compile_together(
            model, optimizer, lambda each, own: make_options(optimizer=own, device=device_of(each), **shared)
        )
    model, notes = compilable(model)
    options = make_options(
        budget=budget,
        optimizer=optimizer,
        backend=backend,
        passes=passes,
        allow=allow,
        verify=verify,
        dynamic=dynamic,
        device=device_of(model),
    )
    compiled = CompiledModule(model, dataclasses.replace(options, notes=(*options.notes, *notes)))
    if example_inputs is not None:
        calls_of(compiled).plan_ahead(*call_arguments(example_inputs))
    return compiled


def make_options(
    *,
    budget: str | int | float | None = None,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str | Engine | None = None,
    passes: Iterable[Pass] | None = None,
    allow: Sequence[str] = (),
    verify: Verification = True,
    dynamic: bool | None = None,
    device: torch.device,
) -> Options:
    """Check what a user asked for and make it definite.

    Raises:
        ValueError: the budget, the backend or a lever is not understood.
        TypeError: `passes` holds something that is not a Pass, or `optimizer` is none.
    """
    if isinstance(allow, str):
        raise ValueError(f"allow takes names in a tuple: allow=({allow!r},)")
    for lever in allow:
        if lever not in LEVERS:
            raise ValueError(f"allow: unknown lever {lever!r} (known: {', '.join(LEVERS)})")
    if verify not in (True, False, "full"):
        raise ValueError(f'verify is {verify!r}: use True, False or "full"')
    listed(optimizer)  # refuses what is none
    if isinstance(passes, Pass):
        raise TypeError(f"passes takes a tuple: passes=({passes!r},)")
    chosen = None if passes is None else tuple(passes)
    for item in chosen or ():
        if not isinstance(item, Pass):
            raise TypeError(f"passes must hold memopt.Pass instances, not {item!r}")
    parsed = None if budget is None else parse_budget(budget)
    engine, notes = engine_of(backend, device, parsed)
    return Options(
        budget=parsed,
        optimizer=optimizer,
        engine=engine,
        passes=chosen,
        verify=verify,
        notes=notes,
        allow=tuple(allow),
        dynamic=dynamic,
    )


def plan(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    budget: str | int | float | None = None,
    *,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
    backend: str = "aten",
    verify: Verification = False,
    device: str | None = None,
) -> Report:
    """Plan a step without running the model and return the report.

    A model in training mode is planned for forward and backward, one in eval mode for inference.

    Args:
        model, inputs, budget, optimizer, backend, verify: as `compile` takes them; `inputs` as its `example_inputs`.
        device: the name of a device to plan for that this machine may not have ("h100", "a100", "rtx4090", …): times
            are estimated from its data sheet, and sizes are those of its allocator. The model may lie anywhere. None:
            plan for the device that the model lies on.

    Raises:
        ValueError: the device is not known (the message lists those that are), or `verify` or a backend other than
            "aten" is asked for with it.
        BudgetError: no plan keeps the budget.
        CaptureError: the model's control flow depends on the values of tensors.
    """
    compiled = compile(model, budget, optimizer=optimizer, backend=backend, verify=verify)
    if device is not None:
        if verify:
            raise ValueError("a plan for a device that is not here cannot be verified by running it: leave verify off")
        if backend != "aten":
            raise ValueError(f'a plan for a device that is not here is one of backend "aten", not {backend!r}')
        asked = calls_of(compiled).optimizers.asked_for()
        compiled = CompiledModule(model, dataclasses.replace(asked, target=find(device)))
    with torch.set_grad_enabled(model.training):
        report = calls_of(compiled).plan(*call_arguments(inputs))
    target = calls_of(compiled).options.target
    if target is None or report.peak_bytes <= target.memory_bytes:
        return report
    note = f"{format_bytes(report.peak_bytes)} are more than the {format_bytes(target.memory_bytes)} of {target.title}"
    return dataclasses.replace(report, notes=(*report.notes, note))


def estimate(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    optimizer: OptimizerLike | Sequence[OptimizerLike] | None = None,
) -> MemoryBreakdown:
    """Predict where the bytes of one step go, without running the model.

    A model in training mode is counted with backward (and the optimizer, where one is given), one in eval mode without.
    The step is the one that `memopt.compile(model, backend="aten")` runs without a budget.

    Raises:
        CaptureError: the model's control flow depends on the values of tensors.
    """
    return plan(model, inputs, None, optimizer=optimizer).breakdown


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from example inputs: a mapping is keywords, a tuple or list is positions."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first tensor is; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
