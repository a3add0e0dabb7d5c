"""Optimizers within backward on code of Inductor."""

import pytest
import torch
from torch import nn

import memopt
from tests.training.test_in_backward import X, compiled, halve_within, hook_all, hooked, net, resident, train


def test_code_of_inductor_hands_them_over_too_and_is_counted_so():
    plain, model, eager = compiled(net(3), None, backend="inductor"), hooked(net(3)), hooked(net(3))
    train(plain, 1)
    stand_in = compiled(model, None, backend="inductor")
    train(stand_in, 2)
    train(eager, 2)
    torch.testing.assert_close(list(model.parameters()), list(eager.parameters()), rtol=1e-4, atol=1e-5)
    measured = memopt.measure(lambda: stand_in(X).sum().backward()).peak_bytes + resident(model)
    assert measured <= stand_in.report.peak_bytes <= 1.05 * measured
    assert stand_in.report.peak_bytes < 0.8 * plain.report.peak_bytes and not stand_in.report.notes


def test_code_of_inductor_calls_hooks_as_eager_does_with_a_graph_that_is_kept():
    def losses(call, model):
        _, seen = hook_all(model)
        loss = call(X).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError):  # the first backward has changed what this one reads
            loss.backward()
        call(X).sum().backward()
        return seen, [p.detach().clone() for p in model.parameters()]

    model, eager = net(2), net(2)
    found, parameters = losses(compiled(model, backend="inductor"), model)
    expected, others = losses(eager, eager)
    assert sorted(found) == sorted(expected)
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


def test_code_of_inductor_refuses_a_hook_that_changes_what_is_read_later():
    model = net(3)

    halve_within(model, model[2].weight)
    with pytest.raises(RuntimeError, match=r"^2\.weight was changed by a hook of another module's parameter while "):
        train(compiled(model, backend="inductor"), 1)


@pytest.mark.gpu
def test_on_a_gpu_code_of_inductor_drops_what_hooks_drop():
    def peak_of(prepare):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
        prepare(model)
        x, run = torch.randn(64, 2048, device="cuda"), memopt.compile(model)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(x).square().mean().backward()
            model.zero_grad()
        return torch.cuda.max_memory_allocated() - before, [p.detach().cpu() for p in model.parameters()]

    every = 8 * 2048 * 2048 * 4
    plain, _ = peak_of(lambda model: None)
    taken, found = peak_of(hooked)
    assert plain > every and taken < plain - every // 2
    torch.manual_seed(0)
    eager = hooked(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda())
    x = torch.randn(64, 2048, device="cuda")
    for _ in range(3):
        eager(x).square().mean().backward()
    torch.testing.assert_close(found, [p.detach().cpu() for p in eager.parameters()], rtol=1e-3, atol=1e-4)
