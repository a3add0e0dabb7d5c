"""Optimizers of a model under a budget: given, given later, learned of by their steps, and grown since."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import memopt
from memopt.memory.optimizer import state_bytes
from memopt.step.optimizers import Optimizers

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))


def compiled(model, budget="4MB", **options):
    return memopt.compile(model, budget, backend="aten", **options)


def steps(stand_in, *optimizers, times=1):
    for _ in range(times):
        stand_in(X).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def real(model, *optimizers):
    return sum(state_bytes(item, model.parameters(), torch.device("cpu")) for item in optimizers)


def counted(stand_in):
    return stand_in.report.breakdown.optimizer_state


def test_one_that_was_not_given_counts_from_its_first_step_on():
    model = make()
    stand_in, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    steps(stand_in, optimizer)
    before = stand_in.report
    assert before.breakdown.optimizer_state == 0 and before.notes == ()
    stand_in(X)
    after = stand_in.report
    assert counted(stand_in) == real(model, optimizer) > 0
    # Its temporaries are there while all gradients are.
    trained = sum(p.nbytes for p in model.parameters())
    assert after.peak_bytes >= 2 * trained + real(model, optimizer) + X.nbytes
    assert after.peak_bytes == after.breakdown.total and after.measured_peak_bytes >= after.peak_bytes
    (note,) = after.notes
    assert note.startswith("AdamW was not given as optimizer: its state, ")
    assert steps(stand_in, optimizer, times=5) is None and counted(stand_in) == real(model, optimizer)


def test_where_the_budget_cannot_be_kept_with_it_the_next_call_says_so():
    model = make()
    stand_in, optimizer = compiled(model, "350kB"), torch.optim.AdamW(model.parameters())
    steps(stand_in, optimizer)
    with pytest.raises(memopt.BudgetError, match=r"optimizer state 264.2[0-9] kB") as caught:
        stand_in(X)
    assert caught.value.breakdown.optimizer_state == real(model, optimizer) and "\n" not in str(caught.value)
    with pytest.raises(memopt.BudgetError) as given:
        steps(compiled(model, "350kB", optimizer=optimizer))
    assert given.value.minimum_bytes == caught.value.minimum_bytes


def test_where_it_can_be_kept_by_another_plan_that_is_made():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Softplus())))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(512, 16)
    given = compiled(model, optimizer=optimizer, example_inputs=x)
    stand_in = compiled(model, given.report.peak_bytes - 20_000)  # what it takes without the optimizer's state
    for _ in range(2):
        stand_in(x).pow(2).mean().backward()
        before = stand_in.report
        optimizer.step()
        optimizer.zero_grad()
    loss = stand_in(x).pow(2).mean()
    torch.testing.assert_close(loss, model(x).pow(2).mean())
    assert counted(stand_in) == real(model, optimizer) and before.budget_bytes == stand_in.report.budget_bytes
    assert stand_in.report.peak_bytes <= stand_in.report.budget_bytes


def test_one_may_be_set_later():
    model = make()
    stand_in, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    stand_in.set_optimizer(torch.optim.SGD)  # before anything is planned
    steps(stand_in)
    assert counted(stand_in) == 0
    stand_in.set_optimizer([optimizer])
    assert counted(stand_in) == 2 * sum(p.nbytes for p in model.parameters()) + 4 * 4
    steps(stand_in, optimizer)
    assert counted(stand_in) == real(model, optimizer) and stand_in.report.notes == ()
    with pytest.raises(TypeError, match="optimizer takes one optimizer, a list of them"):
        stand_in.set_optimizer("adamw")
    with pytest.raises(ValueError, match="SGD: holds none of the parameters"):
        stand_in.set_optimizer(torch.optim.SGD(make().parameters()))
    assert stand_in(X) is not None and counted(stand_in) == real(model, optimizer)
    stand_in.set_optimizer(None)
    assert counted(stand_in) == 0


@pytest.mark.parametrize("several", [False, True])
def test_the_one_before_is_let_go_with_its_state(several):
    model, other = make(), make()
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    if several:
        made = memopt.compile([model, other], "100MB", optimizer=optimizer, backend="aten")
    else:
        made = [memopt.compile(model, "100MB", optimizer=optimizer, backend="aten")]
    for stand_in in made:
        steps(stand_in, optimizer)
    before = weakref.ref(optimizer.state[next(model.parameters())]["exp_avg"])
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    for stand_in in made:
        stand_in.set_optimizer(optimizer)
    gc.collect()
    assert before() is None
    for stand_in in made:
        steps(stand_in, optimizer)
    assert counted(made[0]) == 2 * sum(p.nbytes for p in model.parameters()) + 4 * 4
    assert made[0].report.breakdown.others == (sum(3 * p.nbytes for p in other.parameters()) + 4 * 4) * several


def test_a_class_stands_for_the_one_that_is_made_of_it():
    model = make()
    stand_in = compiled(model, optimizer=torch.optim.AdamW)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    steps(stand_in, optimizer)
    assert 0 < counted(stand_in) < real(model, optimizer)
    stand_in(X)
    assert counted(stand_in) == real(model, optimizer) and stand_in.report.notes == ()


def test_a_group_that_is_added_and_a_parameter_that_is_trained_later():
    model = make()
    optimizer = torch.optim.AdamW([model[0].weight])
    stand_in = compiled(model, optimizer=optimizer)
    steps(stand_in, optimizer, times=3)
    optimizer.add_param_group({"params": [model[2].weight]})
    steps(stand_in, optimizer, times=2)
    assert counted(stand_in) == real(model, optimizer) == 4 * model[0].weight.nbytes + 8
    frozen = make()
    frozen[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(frozen.parameters())
    stand_in = compiled(frozen, optimizer=optimizer)
    steps(stand_in, optimizer)
    frozen[0].weight.requires_grad_(True)
    steps(stand_in)
    assert counted(stand_in) == 2 * sum(p.nbytes for p in frozen.parameters()) + 4 * 4


def test_what_is_told_by_no_copy_counts_after_its_first_step_and_as_it_grows():
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    stand_in = compiled(model, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        loss = stand_in(X).pow(2).mean()
        loss.backward()
        return loss

    stand_in(X)
    assert stand_in.report.notes == ("LBFGS is counted after its first step: its state until then is not",)
    sizes = []
    for _ in range(3):
        optimizer.step(closure)
        stand_in(X)
        sizes.append(real(model, optimizer))
        ahead = 4 * min(after - size for size, after in itertools.pairwise(sizes)) if len(sizes) == 3 else 0
        assert counted(stand_in) == sizes[-1] + ahead and stand_in.report.notes == ()
    assert sizes[0] < sizes[1] < sizes[2]


def test_one_whose_steps_call_no_hooks_is_found():
    model = make()
    stand_in, optimizer = compiled(model), torch.optim.AdamW(model.parameters())

    def step():  # as a compiled one
        type(optimizer).step.__wrapped__(optimizer)

    for _ in range(3):
        stand_in(X).sum().backward()
        step()
    stand_in(X)
    assert counted(stand_in) == real(model, optimizer) > 0


def test_two_that_alternate_and_one_of_another_model():
    model, other = make(), make()
    stand_in = compiled(model)
    first, second = torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[2].parameters())
    foreign = torch.optim.AdamW(other.parameters())
    other(X).sum().backward()
    for optimizer in (first, second):
        steps(stand_in, optimizer, foreign)
    stand_in(X)
    assert counted(stand_in) == real(model, first, second)


def test_nobody_is_watched_for_long():
    def hooks():
        """Those of this room alone: others watch steps for reasons of their own."""
        every = torch_optimizer._global_optimizer_post_hooks.values()
        return sum(hook.__module__ == "memopt.step.optimizers" for hook in every)

    gc.collect()
    before = hooks()
    model = make()
    memopt.compile(model, backend="aten")
    assert hooks() == before  # without a budget
    stand_in, another = compiled(model), compiled(make())
    assert hooks() == 1
    optimizer = torch.optim.AdamW(model.parameters())
    steps(stand_in, optimizer)
    gone = weakref.ref(optimizer)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert gone() is None
    del stand_in, another
    gc.collect()
    assert hooks() == before


def test_a_fraction_is_of_the_step_with_the_optimizer_that_it_turns_out_to_have():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Softplus())))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(512, 16)
    given, stand_in = compiled(model, 0.8, optimizer=optimizer), compiled(model, 0.8)
    given(x).sum().backward()
    expected = given.report.budget_bytes
    optimizer.zero_grad()
    stand_in(x).sum().backward()
    assert stand_in.report.budget_bytes < expected
    optimizer.step()
    optimizer.zero_grad()
    stand_in(x)
    assert stand_in.report.budget_bytes == expected and stand_in.report.peak_bytes <= expected
    stand_in(x[:100])
    assert stand_in.report.budget_bytes == expected


@pytest.mark.parametrize("change", ["frozen", "replaced"])
def test_one_that_steps_nothing_any_more_holds_what_it_held(change):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    stand_in = compiled(model)
    steps(stand_in, optimizer)
    stand_in(X)
    held = counted(stand_in)
    assert held == real(model, optimizer)
    if change == "frozen":
        model.requires_grad_(False)
    else:
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(value.detach() + 1))
    assert stand_in(X) is not None and counted(stand_in) >= held


def test_of_a_frozen_model_there_is_nothing_to_count():
    model = make().requires_grad_(False)
    stand_in = compiled(model, optimizer=torch.optim.AdamW)
    assert stand_in(X.clone().requires_grad_()) is not None and counted(stand_in) == 0


@pytest.mark.parametrize("given", [lambda each: each, lambda each: [each]])
def test_one_that_the_loop_lets_go_of_goes_with_its_state(given):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    stand_in = compiled(model, optimizer=given(optimizer))
    steps(stand_in, optimizer, times=2)
    state, alive = real(model, optimizer), weakref.ref(optimizer)
    assert counted(stand_in) == state
    del optimizer
    gc.collect()
    assert alive() is None
    another = torch.optim.SGD(model.parameters(), 0.1)
    steps(stand_in, another, times=3)
    assert counted(stand_in) == 0


def test_one_that_has_not_stepped_yet_is_kept_whoever_lets_go_of_it():
    model = make()
    stand_in = compiled(model, optimizer=torch.optim.AdamW(model.parameters()))
    gc.collect()
    steps(stand_in)
    assert counted(stand_in) > 0


def test_one_that_cannot_be_set_leaves_those_before_in_force():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    stand_in = compiled(model, optimizer=optimizer)
    steps(stand_in, optimizer, times=2)
    with pytest.raises(ValueError, match="holds none of the parameters"):
        stand_in.set_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    steps(stand_in, optimizer)
    assert counted(stand_in) == real(model, optimizer)


def test_state_that_grows_from_step_to_step_is_counted_ahead():
    """LBFGS' history was looked at in steps of powers of two: three steps took up to 1.07 of their budget, unsaid."""
    model = make()
    optimizer = torch.optim.LBFGS(model[0].parameters(), 0.1, max_iter=2)
    found = Optimizers(model, optimizer, None, watch=True)
    before = []
    for _ in range(8):

        def closure():
            optimizer.zero_grad()
            loss = model(X).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if before:  # as it was counted before this step
            assert before[-1] >= real(model, optimizer) or len(before) < 3
        found.due()
        before.append(found.footprint().state_bytes)
    assert before[-1] <= 2 * real(model, optimizer)


def test_state_that_comes_once_is_no_growth():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    found = Optimizers(model, optimizer, None, watch=True)
    for _ in range(5):
        model(X).pow(2).mean().backward()
        optimizer.step()
        found.due()
        assert found.footprint().state_bytes == real(model, optimizer)
