"""Plans judged by what is known after the first step."""

import torch
from torch import nn

import memopt
from memopt.step.recount import recount


def test_a_plan_that_a_step_has_judged_is_planned_anew_only_for_what_comes_to_it():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    run = memopt.compile(model, "1MB", backend="aten")
    run(torch.randn(32, 16)).square().sum().backward()
    session = run._memopt.sessions.last
    optimizer, others = session.resident.optimizer, session.resident.others
    session.margin = session.limit(0) - session.report.peak_bytes + 1000  # 1000 bytes less than it takes are usable
    assert recount(session, optimizer, others)
    assert not recount(session, optimizer, others + 100)
