"""The examples as a user runs them, with a budget and without: the same losses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name, *options):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / name), *options]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize(
    ("name", "library", "budget", "ways"),
    [
        ("accelerate_lora.py", "peft", "40MB", [("--when", "before"), ("--when", "after")]),
        ("diffusion.py", "diffusers", "60%", [()]),
        ("trl_sft.py", "trl", "40MB", [()]),
    ],
)
def test_losses_within_the_budget_are_those_without_it(name, library, budget, ways):
    pytest.importorskip(library, reason="make test-integrations installs it")
    losses = []
    for options in [("--budget", "none"), *(("--budget", budget, "--backend", "aten", *way) for way in ways)]:
        printed = run(name, *options)
        losses.append([float(value) for value in re.findall(r"^loss (.*)$", printed, re.MULTILINE)])
        assert ("within the budget" in printed) == ("none" not in options)
    assert len(losses[0]) >= 4 and all(found == pytest.approx(losses[0], abs=2e-6) for found in losses[1:])


@pytest.mark.parametrize(("name", "library"), [("lightning_trainer.py", "lightning"), ("hf_trainer.py", "accelerate")])
def test_trainers_print_what_was_planned(name, library):
    pytest.importorskip(library, reason="make test-integrations installs it")
    assert "measured peak" in run(name, "--budget", "100MB")
