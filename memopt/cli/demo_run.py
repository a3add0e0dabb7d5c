"""What the demo measures: a training step of one model, plain and under budgets."""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import memopt
from memopt import models
from memopt.step.observed_steps import FIRST_STEPS

Verdict = Literal["baseline", "ok", "over budget", "numbers differ"]

SHARES = (0.6, 0.45)
TIMED_STEPS = 3
# A measured trial step may show that the least that was predicted is a little more.
_ATTEMPTS = 3
# Single precision in another order of summation stays far below; a wrong mask or a stale tensor lies far above.
LARGEST_ERROR = 1e-4
# Where a model's own gradients move by more if its weights are rounded otherwise, so many times that: untrained batch
# norms and ReLUs make of one rounding a tenth of a gradient.
_NOISES = 2
_ROUNDING = 2.0**-23


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, as `memopt.models.build` makes it, the inputs of its step, and the optimizer's class.

    Attributes:
        label: what it is called; its reports bear what stands before the first comma.
        expected: seconds that its rows take on two idle cores, roughly; empty where nobody knows.
        device: where it runs.
        engine: as `memopt.compile` takes it.
    """

    label: str
    name: str
    options: Mapping[str, Any]
    batch: int
    inputs: Mapping[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    expected: tuple[int, ...] = ()
    device: str = "cpu"
    engine: str = "aten"

    def build(self) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """A new model in train mode, and a batch with labels."""
        model = models.build(self.name, **self.options)
        return model.train(), model.example_inputs(self.batch, labels=True, **self.inputs)


GPT = Case(
    "GPT, 4 layers, 8x256 tokens, AdamW",
    "gpt2",
    {"layers": 4, "width": 256, "heads": 4, "vocabulary": 2048, "positions": 256},
    batch=8,
    inputs={},
    optimizer=torch.optim.AdamW,
    expected=(4, 27, 22),
)
# Half as deep and as wide as a ResNet-50, on more images: as much of a step is activations, of half the graph.
RESNET = Case(
    "ResNet-26, 32 images of 128x128, SGD",
    "resnet50",
    {"layers": (2, 2, 2, 2), "width": 32, "classes": 100},
    batch=32,
    inputs={"resolution": 128},
    optimizer=torch.optim.SGD,
    expected=(4, 35, 35),
)
CASES = (GPT, RESNET)

# Without dropout: Inductor's code draws other numbers than eager does. Of a batch as many halves as fit the device.
_GPT_2 = Case(
    "GPT-2, 12 layers, {batch}x1024 tokens, AdamW",
    "gpt2",
    {"dropout": 0.0},
    batch=16,
    inputs={"sequence": 1024},
    optimizer=torch.optim.AdamW,
    device="cuda",
    engine="inductor",
)
_RESNET_50 = Case(
    "ResNet-50, {batch} images of 224x224, SGD",
    "resnet50",
    {},
    batch=128,
    inputs={"resolution": 224},
    optimizer=torch.optim.SGD,
    device="cuda",
    engine="inductor",
)
_MOST = 0.8  # of the device's memory: plain PyTorch is to fit, with the gaps of its allocator


def gpu_cases(capacity: int, cases: Sequence[Case] = (_GPT_2, _RESNET_50)) -> tuple[Case, ...]:
    """The models that a device of `capacity` bytes trains in plain PyTorch, with batches that it has room for."""
    found = []
    for case in cases:
        model = models.build(case.name, **case.options).train()
        optimizer, batch = case.optimizer(model.parameters(), lr=1e-3), case.batch
        while batch > 1:
            inputs = model.example_inputs(batch, labels=True, **case.inputs)
            if memopt.estimate(model, inputs, optimizer=optimizer).total <= _MOST * capacity:
                break
            batch //= 2
        found.append(dataclasses.replace(case, label=case.label.format(batch=batch), batch=batch))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the demo's table. Sizes are bytes on the device, whole step, everything resident included.

    Attributes:
        setting: `eager`, `60 %`, or the minimum where a share cannot be met.
        seconds: median time of a step.
        gradient_error: see `gradient_error`, against eager's gradients; for eager what rounding makes of them.
    """

    model: str
    setting: str
    budget_bytes: int | None
    predicted_bytes: int | None
    measured_bytes: int
    seconds: float
    gradient_error: float | None
    verdict: Verdict


def run_case(case: Case, seed: int, folder: Path) -> Iterator[Row]:
    """Measure the eager step, then the step under each share of its peak; save each report in the folder.

    Yields:
        A row as soon as it is measured, the eager one first.
    """
    torch.manual_seed(seed)
    plain, inputs = case.build()
    inputs = {name: value.to(case.device) for name, value in inputs.items()}
    plain = plain.to(case.device)
    # A budget is of all tensors of the process: gradients wait as arrays, and each row builds a model of its own.
    expected = {name: value.numpy().copy() for name, value in gradients(plain, inputs, seed).items()}
    noise = gradient_error(expected, gradients(rounded_otherwise(plain, seed), inputs, seed))
    peak, seconds = measure_steps(plain, case.optimizer(plain.parameters(), lr=1e-3), inputs, seed)
    del plain
    yield Row(case.label, "eager", None, None, peak, seconds, noise, "baseline")
    for share in SHARES:
        torch.compiler.reset()  # what was compiled holds the model that it was compiled of
        _let_go(case.device)
        yield _budgeted(case, inputs, expected, noise, share, int(share * peak), seed, folder)


def _budgeted(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, Any],
    noise: float,
    share: float,
    budget: int,
    seed: int,
    folder: Path,
) -> Row:
    torch.manual_seed(seed)
    own = case.build()[0].to(case.device)
    optimizer = case.optimizer(own.parameters(), lr=1e-3)
    setting = f"{share:.0%}"
    for attempt in range(_ATTEMPTS):
        try:
            compiled = memopt.compile(own, budget, example_inputs=inputs, optimizer=optimizer, backend=case.engine)
            break
        except memopt.BudgetError as error:
            if attempt == _ATTEMPTS - 1:
                raise
            setting, budget = f"least ({share:.0%} cannot be met)", error.minimum_bytes
    error_found = gradient_error(expected, gradients(compiled, inputs, seed))
    peak, seconds = measure_steps(compiled, optimizer, inputs, seed)
    for suffix in ("html", "json"):
        name = case.label.split(",")[0].lower().replace(" ", "-") + ("" if case.device == "cpu" else "-gpu")
        compiled.report.save(folder / f"{name}-{share * 100:.0f}.{suffix}")
    return Row(
        case.label,
        setting,
        budget,
        compiled.report.peak_bytes,
        peak,
        seconds,
        error_found,
        judge(error_found, peak, budget, noise),
    )


def judge(error: float, peak: int, budget: int, noise: float = 0.0) -> Verdict:
    """The verdict on a budgeted step, with the error that rounding makes; an undefined error is a difference."""
    if not error <= max(LARGEST_ERROR, _NOISES * noise if noise < 1 else 0.0):  # else it tells nothing
        return "numbers differ"
    return "ok" if peak <= budget else "over budget"


def rounded_otherwise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy whose weights differ by about as much as rounding makes of them."""
    generator, moved = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + _ROUNDING * drawn.to(parameter.device))
    return moved


def gradients(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The gradients of the loss by parameter name; the model's own are left empty."""
    torch.manual_seed(seed)
    model(**inputs).backward()
    found = {
        name: parameter.grad.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def gradient_error(expected: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> float:
    """The largest difference over the largest entry, of all gradients; infinite where one is missing or not finite.

    Args:
        expected: tensors or arrays.
        found: tensors of the same shapes, by the same names.
    """
    if expected.keys() != found.keys():
        return float("inf")
    worst = 0.0
    for name, value in ((name, torch.as_tensor(value)) for name, value in expected.items()):
        scale = value.double().abs().max().item() or 1.0
        error = (found[name].double() - value.double()).abs().max().item() / scale
        if not error < float("inf"):
            return float("inf")
        worst = max(worst, error)
    return worst


def measure_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Mapping[str, torch.Tensor],
    seed: int,
) -> tuple[int, float]:
    """The peak of a whole training step in bytes, what is resident included, and the median seconds of a step."""

    def step() -> None:
        torch.manual_seed(seed)
        model(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the first one makes the optimizer's state and fills caches
    if next(model.parameters()).is_cuda:  # there a budget is of what is reserved
        for _ in range(FIRST_STEPS):  # memopt looks at what else the process holds in these
            step()
        _let_go("cuda")
        torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(_timed(step) for _ in range(TIMED_STEPS))
        return torch.cuda.max_memory_reserved(), seconds
    resident = resident_bytes(model, optimizer, inputs)
    peak = resident + memopt.measure(step).peak_bytes
    for _ in range(FIRST_STEPS - 2):  # memopt looks at the loop in these
        step()
    return peak, statistics.median(_timed(step) for _ in range(TIMED_STEPS))


def _let_go(device: str) -> None:
    """Let go of the row before, and of what the device's allocator keeps of it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _timed(step: Callable[[], None]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    wait()
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started


def _nothing() -> None:
    """No device has work that goes on."""


def resident_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes of parameters, buffers, optimizer state and inputs, each storage counted once."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers(), *state, *inputs.values())
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())
