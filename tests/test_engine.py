"""What holds of a backend that says nothing of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

import memopt
from memopt.backends.aten import AtenBackend
from memopt.capture.dynamo import Hooks
from memopt.engine import Engine
from memopt.memory.timeline import timeline
from tests.support import capture


class Plain(Engine):
    """An engine of one's own."""

    name = "plain"
    exact = True
    seen = 0

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        self.seen += 1
        return AtenBackend().compile_captured(graph_module, example_inputs, hooks)


def test_an_engine_of_one_s_own_needs_no_more_than_a_name_and_a_way_to_lower():
    torch._dynamo.reset()
    engine, model, x = Plain(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
    compiled = memopt.compile(model, backend=engine)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert engine.seen == 1
    assert compiled.report.backend == "plain" and compiled.report.programs[0].arena is None


def test_its_memory_is_the_program_s_own_timeline():
    program = capture(torch.nn.Linear(8, 8), torch.randn(4, 8))
    assert Plain().timeline(program, {"addmm": 512}) == timeline(program, {"addmm": 512})
    assert Plain().timeline(program, {"addmm": 512}) != timeline(program)


def test_what_is_no_engine_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown backend <object object"):
        memopt.compile(torch.nn.Linear(2, 2), backend=object())
