"""Loops that put other weights into a compiled model: numbers as in eager, and nothing stays of those before."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

import memopt

STEPS, ROWS, WIDTH = 6, 64, 24


def made():
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


@contextlib.contextmanager
def by_swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swap(model, call):
    for parameter in model.parameters():
        swap_tensors(parameter, nn.Parameter(0.5 * parameter.detach()))


def cast(model, call):
    model.double()


def cast_stand_in(model, call):
    call.double()


def cast_by_swaps(model, call):
    with by_swaps():
        model.double()


def cast_stand_in_by_swaps(model, call):
    with by_swaps():
        call.double()


def replace(model, call):
    for layer in model[::3]:
        layer.weight = nn.Parameter(0.5 * layer.weight.detach())


def assign(model, call):
    call.load_state_dict({name: value.clone() for name, value in call.state_dict().items()}, assign=True)


CHANGES = [swap, cast, cast_stand_in, cast_by_swaps, cast_stand_in_by_swaps, replace, assign]


def trained(model, call, change, *, keep_gradients=False):
    """Losses of steps with evaluation between them; weights are changed once. Also what they had lain in before."""
    optimizer, numbers, left = torch.optim.SGD(model.parameters(), 0.1), [], []
    for number in range(STEPS):
        torch.manual_seed(number)
        if number == 3:
            optimizer.zero_grad(set_to_none=not keep_gradients)
            changing = change.__name__ not in ("replace", "assign")
            left = [weakref.ref(each.untyped_storage()) for each in model.parameters()] if changing else []
            change(model, call)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(ROWS, WIDTH).to(next(model.parameters()).dtype)
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        if number != 2 or not keep_gradients:
            optimizer.zero_grad()
        with torch.no_grad():
            numbers += [loss.detach(), call.eval()(x).mean()]
        call.train()
    del loss
    gc.collect()
    return [*numbers, *(each.detach() for each in model.state_dict().values())], [each() for each in left]


@pytest.mark.quick("swap", "cast_stand_in_by_swaps", "replace", "assign")
@pytest.mark.parametrize("change", CHANGES)
def test_numbers_are_eagers_and_old_weights_are_freed(change):
    reference, model = made(), made()
    expected, _ = trained(reference, reference, change)
    call = memopt.compile(model, "1MB", optimizer=torch.optim.SGD(model.parameters(), 0.1), backend="aten")
    found, left = trained(model, call, change)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert left == [None] * len(left)


@pytest.mark.quick("swap")
@pytest.mark.parametrize("change", [swap, cast_by_swaps])
def test_weights_with_gradients_are_swapped(change):
    reference, model = made(), made()
    expected, _ = trained(reference, reference, change, keep_gradients=True)
    call = memopt.compile(model, "1MB", optimizer=torch.optim.SGD(model.parameters(), 0.1), backend="aten")
    found, left = trained(model, call, change, keep_gradients=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert left == [None] * len(left)


def test_weights_that_hooks_step_are_swapped():
    """Gradients that backward hands over are no weakly held tensors of a swap, either."""
    numbers = []
    for compiled in (False, True):
        model = made()
        steppers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}

        def step(parameter, steppers=steppers):
            steppers[parameter].step()
            steppers[parameter].zero_grad()

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(step)
        call = memopt.compile(model, "1MB", backend="aten") if compiled else model
        for number in range(4):
            torch.manual_seed(number)
            if number == 2:
                swap(model, call)
                for each in model.parameters():
                    steppers[each] = torch.optim.SGD([each], 0.1)
                    each.register_post_accumulate_grad_hook(step)
            call(torch.randn(ROWS, WIDTH)).square().mean().backward()
        numbers.append(list(model.state_dict().values()))
    torch.testing.assert_close(numbers[1], numbers[0], rtol=0, atol=0)


def test_code_of_inductor_runs_on_swapped_weights():
    reference, model = made(), made()
    expected, _ = trained(reference, reference, swap)
    call = memopt.compile(model, "1MB", optimizer=torch.optim.SGD(model.parameters(), 0.1))
    found, left = trained(model, call, swap)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert left == [None] * len(left)
