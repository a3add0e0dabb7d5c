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


def test_a_limit_that_fell_stays_below_what_was_planned_with_it():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    run = memopt.compile(model, 0.9, backend="aten")
    run(torch.randn(32, 16)).square().sum().backward()
    session = run._memopt.sessions.last
    optimizer, others = session.resident.optimizer, session.resident.others
    planned = session.step.limit
    session.reference.has_fewer_calls(session.reference.training - 1000, 1)
    for _ in range(2):  # eager itself takes less than was supposed
        assert recount(session, optimizer, others)
        assert session.step.limit == session.limit(0) < planned
        assert session.fell(session.limit(0)) == planned - session.limit(0)


def test_what_the_model_holds_by_then_is_counted_with_its_buffers():
    torch._dynamo.reset()
    run = memopt.compile(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), "1MB", backend="aten")
    run(torch.randn(32, 16)).square().sum().backward()
    session = run._memopt.sessions.last
    before = session.report
    assert recount(session, session.resident.optimizer, session.resident.others, 100)
    assert (session.resident.buffers, session.resident.attributes) == (100, 100)
    assert session.report.breakdown.buffers == before.breakdown.buffers + 100
    assert session.report.peak_bytes == before.peak_bytes + 100
