"""The instruments themselves: what the random modules would find, and what they would not call a fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.modules import judging, minimise
from tests.modules.judging import DIFFERENT, ERROR, LENIENT, REFUSED, SAME, Verdict, judge
from tests.modules.programs import Program, judged_by_eager, program
from tests.modules.running import Run, run

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(draw(4, 4, seed=1))
        self.unused = nn.Linear(4, 4)
        self.register_buffer('b', draw(4, seed=2))

    def forward(self, x):
        y = torch.sin(x @ self.w)
        self.b.add_(1)
        z = y * 2
        return y, y.t(), z

def given():
    return [draw(4, 4, seed=3)]

def loop(model, compiled, given, see):
    call = compiled(model)
    x = given()
    out = call(*x)
    see.outputs(out, x)
    (out[0].sum() + out[2].sum()).backward()
    see.gradients(x)
    see.state()
"""


@pytest.fixture
def known() -> Program:
    found = judged_by_eager("known", SOURCE)
    assert found is not None
    return found


def verdict_of(known: Program, source: str, error: Exception | None = None) -> Verdict:
    """The verdict on a run of another source, as if an engine had made it of the known one."""
    found = run(source)
    return judging._verdict(known, Run(found.events, error or found.error))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("y * 2", "y * 2.01", "output 2 is off by"),
        ("z = y * 2", "z = (y * 2).t().contiguous().t()", "output 2: ("),
        ("y.t()", "y.t().detach()", "requires_grad"),
        ("return y, y.t(), z", "return y, y.t().contiguous().t(), z", "sharing"),
        ("self.b.add_(1)", "self.b + 1", "b is off by 1"),
        ("z = y * 2", "z = y * 2 + 0 * self.unused.weight", "unused.weight: False, in eager True"),
        ("z = y * 2", "z = y * 2; torch.rand(1)", "random numbers"),
        ("y = torch.sin(x @ self.w)", "y = torch.sin(x @ self.w); x.zero_()", "input 0 is off by"),
        ("return y, y.t(), z", "return [y, y.t(), z]", "structure"),
        ("y = torch.sin(x @ self.w)", "y = torch.sin(x @ self.w.detach()) + self.w - self.w.detach()", "gradient of w"),
    ],
)
def test_what_differs_is_found_and_named(known: Program, old: str, new: str, what: str) -> None:
    assert old in SOURCE
    found = verdict_of(known, SOURCE.replace(old, new))
    assert found.kind == DIFFERENT
    assert what in found.detail


def test_other_rounding_is_no_difference(known: Program) -> None:
    assert verdict_of(known, SOURCE).kind == SAME
    other = "torch.sin((x[:, :2] @ self.w[:2] + x[:, 2:] @ self.w[2:]))"
    assert verdict_of(known, SOURCE.replace("torch.sin(x @ self.w)", other)).kind == SAME
    assert verdict_of(known, SOURCE.replace("y * 2", "y * (2 + 1e-7)")).kind == SAME


def test_errors_are_refusals_only_in_one_line_of_our_own(known: Program) -> None:
    from memopt.capture.export import CaptureError

    assert verdict_of(known, SOURCE, CaptureError("one line")).kind == REFUSED
    assert verdict_of(known, SOURCE, CaptureError("two\nlines")).kind == ERROR
    assert verdict_of(known, SOURCE, RuntimeError("one line")).kind == ERROR


def test_where_eager_raises_the_engine_should(known: Program) -> None:
    raising = dataclasses.replace(known, eager=Run(known.eager.events, RuntimeError("modified")))
    assert verdict_of(raising, SOURCE).kind == LENIENT
    assert verdict_of(raising, SOURCE, RuntimeError("anything")).kind == SAME


@pytest.mark.parametrize("loops", ["training", "inference", "users"])
def test_a_seed_is_one_program_that_eager_runs(loops: str) -> None:
    before = torch.get_rng_state()
    for seed in range(10):
        one, two = program(seed, loops), program(seed, loops)
        assert one.source == two.source
        assert one.exact.events and (one.exact.error is None) == (one.eager.error is None)
    assert torch.equal(before, torch.get_rng_state())


def test_programs_hold_what_they_are_to_hold() -> None:
    every = "\n".join(program(seed).source for seed in range(120))
    for part in (
        "unfold(", "as_strided(", "expand(", "chunk(", "diagonal(", ".detach()", "torch.no_grad()", "register_buffer(",
        "F.dropout(", "BatchNorm1d(", "retain_graph=True", ".requires_grad_()", "index_put_(", "masked_fill_(",
        "copy_(",
        "Sign.apply(", "checkpoint(", "torch.vmap(", "call.eval()", "'rest'", "AdamW", "graph_break()", "_mode()",
    ):  # fmt: skip
        assert part in every, part


def test_programs_hold_what_users_loops_do() -> None:
    every = "\n".join(program(seed, "users").source for seed in range(200))
    for part in (
        "register_post_accumulate_grad_hook(at_once)", ".register_hook(", "retain_graph=True", "for micro in range(",
        "set_to_none=False", "torch.autograd.grad(", "call(*x).loss", 'call(*x)["loss"]', "call(*x)[0]", ")[step])",
        "torch.no_grad()", "requires_grad_(False)", ".requires_grad_()", "@torch.compiler.disable", "checkpoint(",
        "torch.autocast(", "optimizer=optimizer", "call, teacher = compiled([", "copy.deepcopy(", "load_state_dict(",
        "clip_grad_norm_", "GradScaler", "loss = loss + more", "if step % 2:", "Record(", "Named(", "nn.GRU(",
    ):  # fmt: skip
        assert part in every, part


def test_a_failure_is_cut_down_to_its_lines(monkeypatch: pytest.MonkeyPatch, known: Program) -> None:
    """As if an engine got every sine wrong."""

    def judged(given: Program, *settings: Any) -> Verdict:
        return Verdict(DIFFERENT, "wrong") if "torch.sin" in given.source else Verdict(SAME)

    monkeypatch.setattr(minimise, "judge", judged)
    found = minimise.minimised("known", SOURCE, Verdict(DIFFERENT, "wrong"), "aten")
    assert "torch.sin" in found
    assert "unused" not in found and "y * 2" not in found and "backward" not in found


def test_a_program_is_compiled_and_judged(known: Program) -> None:
    made = judged_by_eager("without a loss", SOURCE.replace("    (out[0]", "    if 0: (out[0]"))
    assert made is not None
    assert judge(made, "aten").kind == SAME
