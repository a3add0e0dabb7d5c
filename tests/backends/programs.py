"""Inference programs with the arguments that they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import memopt
from memopt.pass_manager import PassManager
from memopt.program import InputKind, Program
from tests.support import capture


def program_and_arguments(model: nn.Module, *inputs: torch.Tensor) -> tuple[Program, list[Any]]:
    """The model's program after the passes, and the values of its inputs but constants."""
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, *inputs))
    users = iter(inputs)
    arguments = [
        program.state[entry.name] if entry.name in program.state else next(users)
        for entry in program.inputs
        if entry.kind is not InputKind.CONSTANT
    ]
    return program, arguments


def perceptron() -> nn.Module:
    """Two products with an activation in between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 32)).eval()
