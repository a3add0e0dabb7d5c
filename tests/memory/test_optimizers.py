"""Optimizers as people write them: several, makers, wrappers; each counted as its real state turns out to be."""

import pytest
import torch
from torch import nn

from memopt.memory.optimizer import state_bytes
from memopt.memory.optimizers import Counted, count, holding, listed, together

CPU = torch.device("cpu")


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16))


class Pair(torch.optim.Optimizer):
    """Steps several, as if they were one."""

    def __init__(self, optimizers):
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for item in self.optimizers:
            item.step()


class Accelerated(torch.optim.Optimizer):
    """Like accelerate's: an optimizer by class, made without the constructor, its parts those of another."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def step(self, closure=None):
        self.optimizer.step(closure)


class Duck:
    """Steps another one, and is no optimizer by class."""

    def __init__(self, optimizer):
        self.inner = {"adam": optimizer}

    @property
    def param_groups(self):
        return self.inner["adam"].param_groups

    def step(self):
        self.inner["adam"].step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights of its own, made at the second step."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, {}

    def step(self, closure=None):
        self.optimizer.step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps >= 2 else ():
            for p in group["params"]:
                slow = self.state.setdefault(p, {"slow": p.detach().clone()})["slow"]
                slow.lerp_(p.detach(), 0.5)


class Sharpness(torch.optim.Optimizer):
    """Like SAM: the model runs in its step, and it keeps the weights meanwhile."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.AdamW(self.param_groups)

    def step(self, closure):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
        closure()
        self.base.step()


def adamw(module, **options):
    return torch.optim.AdamW(module.parameters(), **options)


def step(net, optimizers, steps=3):
    for _ in range(steps):
        net(torch.ones(2, 64)).sum().backward()
        for item in optimizers:
            item.step()


def real(net, optimizers):
    return sum(state_bytes(item, net.parameters(), CPU) for item in optimizers)


def frozen(net):
    net[0].weight.requires_grad_(False)
    return adamw(net)


MAKES = {
    "one": adamw,
    "a wrapper": lambda net: Pair([adamw(net[0]), adamw(net[1])]),
    "a wrapper in a wrapper": lambda net: Pair([Accelerated(adamw(net[0])), Pair([adamw(net[1])])]),
    "made without the constructor": lambda net: Accelerated(adamw(net)),
    "no optimizer by class": lambda net: Duck(adamw(net)),
    "slow weights": lambda net: Lookahead(adamw(net)),
    "a rate that is a tensor": lambda net: adamw(net, lr=torch.tensor(0.1)),
    "maximize and amsgrad": lambda net: adamw(net, amsgrad=True, maximize=True),
    "frozen parameters": frozen,
    "adapters only": lambda net: adamw(net[1]),
}


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_counted_as_its_state_turns_out_to_be_and_never_stepped(kind, with_gradients):
    net = model()
    optimizer = MAKES[kind](net)
    if with_gradients:  # a step of what it wraps would be a real one
        net(torch.ones(2, 64)).sum().backward()
    before, values = real(net, [optimizer]), [p.detach().clone() for p in net.parameters()]
    found = count(listed(optimizer), net.parameters())
    torch.testing.assert_close(list(net.parameters()), values, rtol=0, atol=0)
    assert found.later == () and found.footprint.step_peak_bytes > 0
    assert found.footprint.existing_state_bytes == before == real(net, [optimizer])
    step(net, [optimizer])
    assert found.footprint.state_bytes == real(net, [optimizer]) > 0
    after = count(listed(optimizer), net.parameters()).footprint
    assert (after.state_bytes, after.existing_state_bytes) == (found.footprint.state_bytes,) * 2


def test_several_are_counted_together_and_one_in_two_places_once():
    net = model()
    several = [torch.optim.SGD([net[0].weight], momentum=0.9), torch.optim.AdamW([net[1].weight, net[1].bias])]
    found = count(listed((*several, several[0])), net.parameters()).footprint
    alone = [count([item], net.parameters()).footprint for item in several]
    assert found.state_bytes == sum(item.state_bytes for item in alone)
    assert found.step_peak_bytes == max(item.step_peak_bytes for item in alone)
    step(net, several)
    assert found.state_bytes == real(net, several)
    assert listed({"a": several[0], "b": several[1]}) == tuple(several) and listed(None) == ()


RAN = []


def _backend(graph, inputs):
    return lambda *args: RAN.append(args) or graph(*args)


def _update(p, average, grad):
    average.lerp_(grad, 0.1)
    p.sub_(average)


class Compiled(torch.optim.Optimizer):
    """Compiles its step, as torchao's; the code writes to addresses."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if "average" not in self.state[p]:
                self.state[p]["average"] = torch.zeros_like(p)
            torch.compile(_update, backend=_backend, dynamic=False)(p.detach(), self.state[p]["average"], p.grad)


def test_what_was_compiled_of_a_step_is_not_run_on_fake_tensors():
    net = model()
    optimizer = Compiled(net.parameters())
    for _ in range(2):  # before anything is compiled, and after
        RAN.clear()
        found = count([optimizer], net.parameters())
        assert not RAN and found.later == ()
        step(net, [optimizer])
        assert RAN and found.footprint.state_bytes == real(net, [optimizer])


class Addressed(torch.optim.SGD):
    """A kernel of its own takes addresses."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.kernel(p.data_ptr())

    def kernel(self, address):
        assert address


def test_a_kernel_of_an_optimizers_own_is_not_called_without_an_address():
    net = model()
    assert count([Addressed(net.parameters(), lr=0.1)], net.parameters()) == Counted(
        together([]).footprint, ("Addressed",)
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_beside_another():
    net = model()
    both = [torch.optim.Muon([net[0].weight, net[1].weight]), torch.optim.AdamW([net[0].bias, net[1].bias])]
    found = count(listed(both), net.parameters())
    step(net, both)
    assert found == Counted(found.footprint) and found.footprint.state_bytes == real(net, both)


def closing_over(net):
    inner = adamw(net)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.also = lambda: inner.step()
    return optimizer


def test_what_no_step_on_fake_tensors_tells_is_counted_by_what_is_there():
    net = model()
    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=2)
    assert count([lbfgs], net.parameters()) == Counted(together([]).footprint, ("LBFGS",))
    lbfgs.step(lambda: net(torch.ones(2, 64)).sum())
    net(torch.ones(2, 64)).sum().backward()
    lbfgs.step(lambda: net(torch.ones(2, 64)).sum())
    found = count([lbfgs], net.parameters())
    assert found.footprint.state_bytes == real(net, [lbfgs]) > 0 and found.later == ("LBFGS",)
    assert holding(found, 3 * real(net, [lbfgs])).footprint.state_bytes == 3 * real(net, [lbfgs])
    # A wrapper that runs the model counts for what it wraps, and later for the rest.
    sharpness = Sharpness(net.parameters())
    inside = count([sharpness], net.parameters())
    assert inside.later == ("Sharpness",) and inside.footprint == count([adamw(net)], net.parameters()).footprint
    closed = closing_over(net)
    assert count([closed], net.parameters()).later == ("SGD",) and not closed.state


class Quantized(torch.Tensor):
    """One byte per element, as the state of 8-bit optimizers; what it says of itself is four."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size=None, stride=None):
        return cls(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        wide = [arg.codes.float() if isinstance(arg, Quantized) else arg for arg in args]
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(wide[1])
            return args[0]
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].codes)
        return func(*wide, **(kwargs or {}))


class EightBit(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["average"] = Quantized(torch.zeros(p.shape, dtype=torch.uint8, device=p.device))
                    state["average"].copy_(state["average"] + p.grad)
                    p.sub_(p.grad, alpha=0.1)


def test_state_that_wraps_others_counts_by_what_it_wraps():
    net = model()
    optimizer = EightBit(net.parameters())
    size = sum(p.numel() for p in net.parameters())
    assert count([optimizer], net.parameters()).footprint.state_bytes == size
    step(net, [optimizer])
    after = count([optimizer], net.parameters()).footprint
    assert (after.state_bytes, after.existing_state_bytes) == (size, size) == (real(net, [optimizer]), size)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of torch's own import
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_an_optimizer_that_is_shared_out_counts_for_what_is_here():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = model()
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
        found = count([optimizer], net.parameters())
        expected = count([adamw(net)], net.parameters()).footprint.state_bytes
        assert found.footprint.state_bytes == expected and found.footprint.step_peak_bytes > 0
        step(net, [optimizer])
        assert real(net, [optimizer]) == expected
    finally:
        torch.distributed.destroy_process_group()


def test_accelerates_own():
    accelerate = pytest.importorskip("accelerate")
    net = model()
    optimizer = accelerate.Accelerator(cpu=True).prepare(adamw(net))
    found = count([optimizer], net.parameters())
    step(net, [optimizer])
    assert found.later == () and found.footprint.state_bytes == real(net, [optimizer])


@pytest.mark.parametrize(
    "given", [3, "adamw", nn.Linear(1, 1), nn.Linear, [], [3], torch.optim.lr_scheduler.StepLR, object()]
)
def test_what_is_none_is_refused(given):
    with pytest.raises(
        TypeError, match=r"^optimizer (takes|is empty: it takes) one optimizer, a list of them, or "
    ) as caught:
        listed(given)
    assert "\n" not in str(caught.value)


def test_one_whose_parameters_are_frozen_for_now_counts_for_what_it_holds():
    net = model()
    ahead, later = torch.optim.AdamW(net[0].parameters()), torch.optim.AdamW(net[1].parameters())
    net[1].requires_grad_(False)
    assert count([ahead, later], net.parameters()) == count([ahead], net.parameters())
    net.requires_grad_(True)
    every = count([ahead, later], net.parameters()).footprint.state_bytes
    net(torch.ones(2, 64)).sum().backward()
    ahead.step()
    later.step()
    net[1].requires_grad_(False)
    assert count([ahead, later], net.parameters()).footprint.state_bytes == every


def test_one_of_several_that_holds_no_parameter_is_named():
    net, other = model(), model()
    with pytest.raises(ValueError, match=r"^SGD: holds none of the parameters"):
        count([adamw(net), torch.optim.SGD(other.parameters())], net.parameters())
