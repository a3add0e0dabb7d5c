"""The user's hooks on what is saved for backward: seen, out of reach of what memopt tries, and theirs in the call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.calls.several import HOOKED
from memopt.torch_compat.saved_tensors import hooks_in_force, is_from_hooks, saved_as_it_is


def test_hooks_are_seen():
    assert not hooks_in_force()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        assert hooks_in_force()


def test_what_is_tried_does_not_reach_them():
    packed = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda value: packed.append(value) or value, lambda value: value):
        with saved_as_it_is():
            x.sin().sum().backward()
        assert not packed
        x.sin().sum()
        assert packed


def test_where_hooks_are_forbidden_nothing_is_asked():
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"), saved_as_it_is():
        assert not hooks_in_force()


def test_an_error_is_a_hooks_own_where_a_users_file_raises_it():
    def mine():
        raise ValueError

    def of_memopt():
        memopt.parse_budget("a lot")

    def found(run):
        with pytest.raises(Exception) as raised:
            run()
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
            return is_from_hooks(raised.value)

    assert found(mine) and not found(of_memopt) and not found(lambda: nn.Module().missing)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))])


def broken():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers(), layers()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    return Broken()


def trained(model, call, around):
    torch._dynamo.reset()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        with around():
            loss = F.mse_loss(call(torch.randn(32, 16)), torch.ones(32, 16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()


def same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    torch.testing.assert_close(found[1], wanted[1])
    assert torch.equal(found[2], wanted[2])


@pytest.mark.quick("1MB-layers-False", "None-layers-True", "0.9-layers-False")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [layers, broken], ids=["layers", "broken"])
@pytest.mark.parametrize("budget", [None, "1MB", 0.9])
def test_a_checkpoint_around_the_stand_in(make, budget, reentrant):
    if budget == 0.9 and make is broken:
        pytest.skip("a graph break of a tiny model leaves no room below eager's own peak")

    def run(model, call):
        def checkpointed(x):
            return checkpoint(call, x.requires_grad_(reentrant), use_reentrant=reentrant)

        return trained(model, checkpointed, torch.enable_grad)

    plain, other = make(), make()
    wanted = run(plain, plain)
    same(run(other, memopt.compile(other, budget, backend="aten")), wanted)


@pytest.mark.parametrize("budget", [None, 0.9])
def test_what_is_saved_goes_to_the_host(budget):
    plain, other = layers(), layers()
    wanted = trained(plain, plain, torch.autograd.graph.save_on_cpu)
    found = trained(other, memopt.compile(other, budget, backend="aten"), torch.autograd.graph.save_on_cpu)
    same(found, wanted)


def test_checkpoints_around_several_calls_of_a_step():
    def run(model, call):
        def twice(x):
            return checkpoint(call, checkpoint(call, x, use_reentrant=False), use_reentrant=False)

        return trained(model, twice, torch.enable_grad)

    plain, other = layers(), layers()
    compiled = memopt.compile(other, 0.9, backend="aten")
    same(run(other, compiled), run(plain, plain))
    assert HOOKED in compiled.report.notes


class StopError(Exception):
    pass


def test_what_a_hook_raises_is_the_users():
    def stop(value):
        raise StopError

    model = layers()
    compiled = memopt.compile(model, backend="aten")
    compiled(torch.randn(32, 16)).sum().backward()
    with pytest.raises(StopError), torch.autograd.graph.saved_tensors_hooks(stop, lambda value: value):
        compiled(torch.randn(32, 16))
    assert not compiled._memopt.fallback.notes, "it did not fall back"
    compiled(torch.randn(32, 16)).sum().backward()
