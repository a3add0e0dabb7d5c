"""Compare a program's run on an engine with eager: the same, refused, different, or an error of the engine's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from memopt.budget import BudgetError
from memopt.capture.export import CaptureError
from memopt.pass_manager import PassError
from tests.modules.programs import Program
from tests.modules.running import Run, compiler, run

OWN = (BudgetError, CaptureError, PassError)
# Of refusals in backward.
WORDS = (
    "changed between forward and backward",
    "for gradients of the loss alone",
    "for a loop that keeps the loss alone",
)
SAME, REFUSED, DIFFERENT, ERROR, LENIENT = "same", "refused", "different", "error", "lenient"
FALLBACK = "fallback"  # it failed inside, said so in one line, and let the model run eagerly or refused the budget
CRASH = "crash"  # found from outside: the process ended
FAILURES = (DIFFERENT, ERROR)
# How far a value may be from float64's: times eager's own distance, times the largest value, and at least.
_NOISE, _SCALE, _LEAST = 8.0, 1e-5, 1e-6


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program on an engine.

    Attributes:
        kind: same; refused, in one line of memopt's own; fallback, where that line asks for a report; different from
            eager; error, of the engine's own; lenient, where eager raises in backward and the engine does not.
        detail: what differs, or the line.
        budget: what the program was compiled with in the end: bytes, where the least that a refusal named was used.
    """

    kind: str
    detail: str = ""
    budget: Any = None
    words: tuple[str, ...] = ()


def judge(program: Program, engine: str, budget: Any = None, verify: Any = False) -> Verdict:
    """Run a program on an engine. With a budget that no plan keeps, run it with the least that is named instead.

    Where a later step needs more than that, it is refused again, and run with twice what is named then.
    """
    found = run(program.source, compiled=compiler(engine, budget, verify))
    for times in (1, 2):
        if isinstance(found.error, BudgetError) and budget is not None and found.error.minimum_bytes > 0:
            budget = times * found.error.minimum_bytes
            found = run(program.source, compiled=compiler(engine, budget, verify))
    verdict = _verdict(program, found)
    said = "\n".join((verdict.detail, *found.words))
    if verdict.kind in (SAME, REFUSED) and "please report" in said:
        verdict = Verdict(FALLBACK, said.strip())
    return dataclasses.replace(verdict, budget=budget, words=found.words)


def _verdict(program: Program, found: Run) -> Verdict:
    expected = program.eager
    events = list(zip(expected.events, found.events, strict=False))
    for exact, (eager, event) in zip(program.exact.events, events, strict=False):
        if event.label != eager.label or event.facts.keys() != eager.facts.keys():
            return Verdict(DIFFERENT, f"{eager.label}: {event.facts} for {eager.facts}")
        for name, fact in eager.facts.items():
            if event.facts[name] != fact:
                return Verdict(DIFFERENT, f"{eager.label}: {name}: {event.facts[name]}, in eager {fact}")
        for name, value in eager.values.items():
            if not _close(event.values[name], value, exact.values[name]):
                spread = _spread(program, eager.label, name)
                if not _close(event.values[name], value, exact.values[name], spread):
                    off = (event.values[name].double() - exact.values[name].double()).abs().max()
                    return Verdict(DIFFERENT, f"{eager.label}: {name} is off by {off:.3g}")
    if found.error is not None:
        if expected.error is not None:
            return Verdict(SAME, "raises as eager does")
        text = f"{type(found.error).__name__}: {found.error}"
        own = isinstance(found.error, OWN) or any(words in text for words in WORDS)
        refused = own and len(str(found.error).splitlines()) == 1
        return Verdict(REFUSED if refused else ERROR, text)
    if expected.error is not None:
        return Verdict(LENIENT, str(expected.error).splitlines()[0])
    return Verdict(SAME)


def _close(found: Tensor, eager: Tensor, exact: Tensor, spread: float = 0.0) -> bool:
    if torch.equal(found, eager):
        return True
    if not found.is_floating_point() or found.shape != exact.shape:
        return False
    exact = exact.double()
    error, noise = (found.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    return bool(error <= _NOISE * (noise + spread) + _SCALE * exact.abs().max() + _LEAST)


def _spread(program: Program, label: str, name: str) -> float:
    """How far the value moves in float64 if every number that the program draws does in its last float32 bits."""
    spread = 0.0
    for noise in (1, 1001, 2001):
        for exact, event in zip(
            program.exact.events, run(program.source, torch.float64, noise=noise).events, strict=False
        ):
            if event.label == label and name in event.values and event.values[name].shape == exact.values[name].shape:
                spread = max(spread, (event.values[name].double() - exact.values[name].double()).abs().max().item())
    return spread
