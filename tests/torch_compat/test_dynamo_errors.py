"""What Dynamo itself fails at is told from what memopt or the model does, and where in the model that is."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.torch_compat.dynamo_errors import is_tracers_own, place_in_model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


HERE = Path(__file__).name


class Rotated(nn.Module):
    """Shows its input as complex numbers over a branch, which Dynamo has no fake tensor for."""

    def __init__(self, apart):
        super().__init__()
        self.layer, self.apart = nn.Linear(8, 8), apart

    def forward(self, x):
        y = self.layer(x) if self.apart else x
        z = torch.view_as_complex(y.view(-1, 4, 2).clone() if self.apart == "cloned" else y.view(-1, 4, 2))
        if x.sum() > -1e9:
            z = z * 2
        return self.layer(torch.view_as_real(z).reshape(-1, 8))


def trained(apart, budget):
    torch.manual_seed(0)
    model, x = Rotated(apart), torch.randn(64, 8)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, budget, backend="aten", verify=False)
    for step in (run, twin):
        step(x).square().sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
    return run


def test_without_a_budget_the_model_runs_eagerly_and_the_line_names_the_place_and_the_way_out(caplog):
    with caplog.at_level(logging.WARNING, "memopt"):
        trained("", None)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "memopt"]
    assert f"tracer fails at {HERE}:" in line and "clone() the view before the branch" in line and "\n" not in line
    assert "please report" not in line and "memopt failed" not in line


def test_within_a_budget_the_step_is_counted_and_runs_eagerly(caplog):
    with caplog.at_level(logging.WARNING, "memopt"):
        trained("", "1MB")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "memopt"]
    assert "runs eagerly" in line and f"Rotated cannot be captured: torch's tracer fails at {HERE}:" in line


def test_a_view_that_is_cloned_before_the_branch_is_planned():
    assert trained("cloned", "1MB").report.programs


def test_only_torchs_own_frames_below_dynamo_make_it_dynamos_own():
    assert not is_tracers_own(ValueError("raised nowhere"))

    def broken(graph_module, example_inputs):
        raise ValueError("of a backend")

    with pytest.raises(Exception, match="of a backend") as raised:
        torch.compile(nn.Linear(2, 2), backend=broken)(torch.ones(1, 2))
    assert not is_tracers_own(raised.value)


def test_the_innermost_place_is_named():
    error = RuntimeError(
        'x\n\nfrom user code:\n   File "/a/b.py", line 3, in f\n    g()\n  File "/a/c.py", line 7, in g'
    )
    assert place_in_model(error) == "c.py:7"
    assert place_in_model(RuntimeError("x")) == ""
