"""Gradients that hooks use and drop within backward: the saving is kept and planned with, and hooks see eager's."""

import pytest
import torch
from torch import nn

import memopt
from memopt.step.hooked import KEPT

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def net(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(64, 64), nn.GELU())))


def hook_all(model, make=lambda p: torch.optim.SGD([p], lr=0.1)):
    """Give each parameter an optimizer of its own, which a hook steps; return these, and of what hooks were called."""
    optimizers, seen = {p: make(p) for p in model.parameters()}, []

    def step(p):
        seen.append(tuple(p.shape))
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values()), seen


def drop(p):
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.1)
    p.grad = None


def hooked(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(drop)
    return model


def compiled(model, budget="40MB", backend="aten", **options):
    return memopt.compile(model, budget, backend=backend, **options)


def halve_within(model, weight):
    """Have the hook of each parameter change a weight, which may be another module's."""

    def decay(p):
        with torch.no_grad():
            weight.mul_(0.5)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(decay)


def resident(model, optimizers=()):
    state = (v for item in optimizers for entry in item.state.values() for v in entry.values())
    return sum(t.nbytes for t in (*model.parameters(), *state, X))


def train(call, steps=3):
    for _ in range(steps):
        call(X).sum().backward()


def test_the_saving_is_kept_and_planned_with():
    plain, model = compiled(net()), hooked(net())
    plain(X)
    stand_in = compiled(model)
    train(stand_in)
    measured = memopt.measure(lambda: stand_in(X).sum().backward()).peak_bytes + resident(model)
    eager = memopt.measure(lambda: model(X).sum().backward()).peak_bytes + resident(model)
    report = stand_in.report
    assert measured <= 1.02 * eager and measured <= report.peak_bytes <= 1.02 * measured
    assert report.peak_bytes < 0.75 * plain.report.peak_bytes
    with pytest.raises(memopt.BudgetError):
        compiled(net(), report.peak_bytes)(X)
    tight = compiled(hooked(net()), report.minimum_bytes)
    train(tight)
    assert tight.report.peak_bytes <= report.minimum_bytes < report.peak_bytes


def test_optimizers_of_single_parameters_are_counted_with_what_they_take_within_backward():
    model = net()
    optimizers, _ = hook_all(model, lambda p: torch.optim.AdamW([p]))
    given, learned = compiled(model, optimizer=optimizers), compiled(model)
    train(given)
    train(learned)
    measured = memopt.measure(lambda: given(X).sum().backward()).peak_bytes + resident(model, optimizers)
    assert measured <= given.report.peak_bytes <= 1.05 * measured
    assert given.report.peak_bytes == learned.report.peak_bytes and len(learned.report.notes) == 1


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Returning(nn.Module):
    """Returns its weight, a view of it, and adds a bias whose gradient is another value's."""

    def __init__(self):
        super().__init__()
        self.first, self.weight, self.whole = nn.Linear(64, 64), nn.Parameter(torch.eye(64)), nn.Parameter(X.clone())

    def forward(self, x):
        y = torch.tanh(self.first(x) + self.whole) @ self.weight
        return y.sum() + (self.weight.t() ** 2).sum(), self.weight, self.weight.t()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(2, 2)

    def forward(self, x):
        return self.norm(self.first(x))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.used(hidden), self.unused(hidden)


def of_one_head(call, model, x):
    call(x)[0].pow(2).mean().backward()


def once(call, model, x):
    call(x).pow(2).mean().backward()


def used_outside(call, model, x):
    (call(x).pow(2).mean() + model[0].weight.pow(2).sum() + model[2].bias.sum()).backward()


def called_twice(call, model, x):
    (call(x) * call(x + 1)).mean().backward()


def some_gradients(call, model, x):
    loss = call(x).pow(2).mean()
    found = torch.autograd.grad(loss, [model[4].weight, model[0].bias], retain_graph=True)
    loss.backward()
    with torch.no_grad():
        model[0].bias.sub_(found[1])
        model[4].weight.sub_(found[0])


def of_the_input(call, model, x):
    x = x.clone().requires_grad_()
    call(x).pow(2).mean().backward()
    with torch.no_grad():
        model[0].bias.sub_(x.grad.sum(0))


def from_the_middle(call, model, x):
    hidden = torch.nn.functional.linear(x, torch.eye(64) + model[0].weight)
    call(hidden).pow(2).mean().backward()


def in_autocast(call, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(x).float().pow(2).mean()
    loss.backward()


def of_several(call, model, x):
    loss, weight, view = call(x)
    (loss + weight.mean() + (view * torch.ones(64, 64)).sum()).backward()


def scaled(call, model, x):
    handles = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    once(call, model, x)
    for handle in handles:
        handle.remove()


STEPS = [
    (net, once),
    (net, used_outside),
    (net, called_twice),
    (net, some_gradients),
    (net, of_the_input),
    (net, from_the_middle),
    (net, in_autocast),
    (net, scaled),
    (Broken, once),
    (Tied, once),
    (Normed, once),
    (Returning, of_several),
    (Heads, of_one_head),
]


@pytest.mark.quick("*sgd-net *", "adamw-net once")
@pytest.mark.parametrize(("make", "step"), STEPS, ids=[f"{make.__name__} {step.__name__}" for make, step in STEPS])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_hooks_see_what_eager_gives_them(make, step, adam):
    results = []
    for under in (lambda model: model, compiled):
        torch.manual_seed(0)
        model = make()
        _, seen = hook_all(
            model, (lambda p: torch.optim.AdamW([p], lr=0.01)) if adam else lambda p: torch.optim.SGD([p])
        )
        call = under(model)
        for number in range(3):
            step(call, model, X + number)
        assert all(p.grad is None for p in model.parameters())
        results.append((list(model.parameters()), sorted(seen)))
    (eager, eager_seen), (found, found_seen) = results
    torch.testing.assert_close(found, eager, rtol=2e-3 if step is in_autocast else 1e-4, atol=1e-5)
    assert found_seen == eager_seen


def test_backward_may_run_twice():
    model, seen = net(2), []

    def look(p):
        seen.append(p.grad.clone())
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    loss = compiled(model)(X).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(seen[:4], seen[4:], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_hooks_of_some_parameters_and_a_plan_that_recomputes():
    models = [
        nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Softplus(), nn.GELU()))) for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(256, 64)
    for model in models:
        model[0].weight.register_post_accumulate_grad_hook(drop)
        model[6].bias.register_post_accumulate_grad_hook(drop)
    stand_in = compiled(models[1], 0.7)
    for call, model in zip((models[0], stand_in), models, strict=True):
        for _ in range(3):
            call(x).pow(2).mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        drop(p)
    torch.testing.assert_close(list(models[1].parameters()), list(models[0].parameters()), rtol=1e-4, atol=1e-5)


def test_what_hooks_leave_counts_to_the_end_of_backward():
    model, norms = net(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(float(p.grad.norm())))
    stand_in, plain = compiled(model), compiled(net())
    plain(X)
    train(stand_in, 1)
    assert stand_in.report.peak_bytes < plain.report.peak_bytes
    model.zero_grad()
    train(stand_in, 1)
    assert stand_in.report.peak_bytes == plain.report.peak_bytes and stand_in.report.notes == (KEPT,)
    assert sorted(norms[:12]) == pytest.approx(sorted(norms[12:]))


def test_a_hook_that_drops_every_second_gradient():
    results = []
    for under in (lambda model: model, compiled):
        model, counts = net(2), {}

        def second(p, counts=counts):
            counts[p] = counts.get(p, 0) + 1
            if counts[p] % 2 == 0:
                drop(p)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(second)
        train(under(model), 4)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_hooks_that_come_and_go():
    model = net()
    stand_in = compiled(model)
    train(stand_in, 1)
    without = stand_in.report.peak_bytes
    model.zero_grad()
    handles = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    train(stand_in, 2)
    assert stand_in.report.peak_bytes < 0.75 * without and model[0].weight.grad is None
    for handle in handles:
        handle.remove()
    train(stand_in, 1)
    assert stand_in.report.peak_bytes == without and model[0].weight.grad is not None


def test_a_hook_may_change_its_own_modules_parameters_and_no_others_that_are_still_read():
    results = []
    for under in (lambda model: model, compiled):
        model = net()
        for layer in model[::2]:
            both = torch.optim.SGD(layer.parameters(), lr=0.1)

            def step(p, both=both):
                both.step()
                p.grad = None

            for p in layer.parameters():
                p.register_post_accumulate_grad_hook(step)
        train(under(model), 2)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    model = net()
    everything = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    halve_within(model, model[2].weight)
    with pytest.raises(
        RuntimeError, match=r"^2\.weight was changed by a hook of another module's parameter while "
    ) as caught:
        train(compiled(model, optimizer=everything), 1)
    assert "\n" not in str(caught.value)


def test_a_second_derivative_is_refused_as_elsewhere():
    model = hooked(net(2))
    loss = compiled(model)(X).pow(2).mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="memopt compiles first derivatives only"):
        sum(gradient.pow(2).sum() for gradient in found).backward()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_hooks_are_not_called_for_a_parameter_that_nothing_depends_on(backend):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            self.unused(x)  # a head whose result is not returned
            return self.used(x)

    model, norms = Partly(), []
    for p in model.parameters():
        p.register_hook(lambda g: norms.append(g.norm()))
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    train(memopt.compile(model, backend=backend))
    assert len(norms) == 3 * 2 * 2
