"""Counted optimizer bytes against those of the real optimizer, for every optimizer that torch has."""

import functools
import gc

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree

from memopt.memory.measure import measure
from memopt.memory.optimizer import OptimizerFootprint, optimizer_footprint
from memopt.memory.rounding import allocated_bytes

SHAPES = [(257, 64), (64,), (64, 33), (33,), (5, 4, 3)]


def make_parameters(dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def set_gradients(parameters):
    for p in parameters:
        p.grad = torch.randn(p.shape, device=p.device).to(p.dtype)


def real_state_bytes(optimizer):
    leaves = filter(torch.is_tensor, pytree.tree_leaves(list(optimizer.state.values())))
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


def optim(name, **kwargs):
    return pytest.param(functools.partial(getattr(torch.optim, name), **kwargs), id=f"{name} {kwargs or ''}")


OPTIMIZERS = [
    optim("SGD", lr=0.1),
    optim("SGD", lr=0.1, weight_decay=0.1),
    optim("SGD", lr=0.1, momentum=0.9),
    optim("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    optim("SGD", lr=0.1, momentum=0.9, fused=True),
    optim("Adam"),
    optim("Adam", foreach=True),
    optim("Adam", fused=True),
    optim("Adam", amsgrad=True),
    optim("Adam", amsgrad=True, foreach=True, weight_decay=0.1),
    optim("Adam", lr=torch.tensor(0.01)),
    optim("Adam", maximize=True, foreach=True),
    optim("AdamW"),
    optim("AdamW", foreach=True),
    optim("AdamW", foreach=False),
    optim("AdamW", fused=True),
    optim("Adagrad"),
    optim("Adagrad", foreach=True),
    optim("Adagrad", fused=True),
    optim("Adadelta"),
    optim("Adadelta", foreach=True),
    optim("Adamax"),
    optim("Adamax", foreach=True),
    optim("ASGD"),
    optim("ASGD", foreach=True),
    optim("Adafactor"),
    optim("Adafactor", foreach=True),
    optim("NAdam"),
    optim("NAdam", foreach=True),
    optim("RAdam"),
    optim("RAdam", foreach=True),
    optim("RMSprop"),
    optim("RMSprop", centered=True, momentum=0.5),
    optim("RMSprop", centered=True, momentum=0.5, foreach=True),
    optim("Rprop"),
    optim("Rprop", foreach=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equal_to_the_real_optimizer(make, dtype):
    parameters = make_parameters(dtype)
    set_gradients(parameters)
    real = make(parameters)
    before = optimizer_footprint(real, parameters)
    as_class = optimizer_footprint(make, parameters)
    assert before.existing_state_bytes == real_state_bytes(real)
    assert (as_class.state_bytes, as_class.step_peak_bytes) == (before.state_bytes, before.step_peak_bytes)
    for _ in range(10):
        real.step()
    assert before.state_bytes == real_state_bytes(real)
    after = optimizer_footprint(real, parameters)
    assert after == OptimizerFootprint(before.state_bytes, before.state_bytes, before.step_peak_bytes)
    measured = measure(real.step)
    assert measured.end_bytes == 0
    if isinstance(real, torch.optim.Adafactor) and dtype is torch.bfloat16:
        return  # the norm's kernel casts inside itself
    assert abs(before.step_peak_bytes - measured.peak_bytes) <= max(0.02 * measured.peak_bytes, 1024)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.0}], ids=str)
def test_numbers_beside_tensors_are_counted_to_the_byte(options):
    parameters = make_parameters(shapes=[(64, 64)])
    set_gradients(parameters)
    optimizer = torch.optim.AdamW(parameters, **options)
    for _ in range(2):
        optimizer.step()
    assert optimizer_footprint(optimizer, parameters).step_peak_bytes == measure(optimizer.step).peak_bytes


def test_nothing_is_touched():
    parameters = make_parameters()
    set_gradients(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    hooks = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("own"))
    handle = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: hooks.append("global"))
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: hooks.append("grad"))
    values = [t.clone() for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
    types = list(torch_optimizer._foreach_supported_types)
    groups, random = [dict(group) for group in optimizer.param_groups], torch.get_rng_state()
    optimizer_footprint(optimizer, parameters)
    handle.remove()
    assert hooks == []
    for group, then in zip(optimizer.param_groups, groups, strict=True):
        assert group.keys() == then.keys() and all(group[key] is then[key] for key in group)
    now = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(now, values, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch_optimizer._foreach_supported_types == types


def test_no_memory_is_taken():
    parameters = make_parameters(shapes=[(1000, 1000)])
    optimizer = torch.optim.Adam(parameters)
    set_gradients(parameters)
    optimizer.step()
    assert measure(optimizer_footprint, optimizer, parameters).peak_bytes < 10_000
    gc.collect()


def test_only_parameters_with_gradients_get_state():
    parameters = make_parameters()
    parameters[0].requires_grad_(False)
    optimizer = torch.optim.Adam(parameters)
    expected = sum(2 * p.nbytes + 4 for p in parameters[1:])
    assert optimizer_footprint(optimizer, parameters).state_bytes == expected
    assert optimizer_footprint(optimizer, parameters[3:]).state_bytes == sum(2 * p.nbytes + 4 for p in parameters[3:])


def test_groups_options_and_tied_parameters():
    first, second = make_parameters(shapes=[(100,), (50,)])
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert optimizer_footprint(optimizer, [first, second, first]).state_bytes == first.nbytes
    assert optimizer_footprint(lambda _: optimizer, [first, second]).state_bytes == first.nbytes


def test_a_users_optimizer():
    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.calls = []

        @torch.no_grad()
        def step(self):
            self.calls.append(1)
            for group in self.param_groups:
                for p in group["params"]:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    if p.grad.norm().item() > 0:
                        p.sub_(torch.sign(average * 0.9 + p.grad), alpha=0.1)
                    average.lerp_(p.grad, 0.01)

    parameters = make_parameters()
    set_gradients(parameters)
    optimizer = Lion(parameters)
    footprint = optimizer_footprint(optimizer, parameters)
    assert optimizer.calls == []
    optimizer.step()
    assert footprint.state_bytes == real_state_bytes(optimizer)
    assert footprint.step_peak_bytes == measure(optimizer.step).peak_bytes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS: runs the model inside step"),
        (torch.optim.SparseAdam, "SparseAdam cannot be counted: .*does not support dense gradients"),
        (lambda p: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), "SGD: holds none of the parameters"),
        (
            functools.partial(torch.optim.Adam, lr=-1.0),
            "Adam cannot be made of .*: Invalid learning rate",
        ),
        (functools.partial(torch.optim.Adam, capturable=True), "Adam cannot be counted: .*capturable=True"),
    ],
)
def test_refused_in_one_clear_line(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        optimizer_footprint(make, make_parameters())
    assert "\n" not in str(caught.value)


def test_parameters_must_share_one_device():
    with pytest.raises(ValueError, match="one device, not none"):
        optimizer_footprint(torch.optim.SGD, [])
    mixed = [torch.nn.Parameter(torch.ones(2, device=d)) for d in ("cpu", "meta")]
    with pytest.raises(ValueError, match=r"one device, not \['cpu', 'meta'\]"):
        optimizer_footprint(torch.optim.SGD, mixed)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adafactor", "NAdam"])
@pytest.mark.parametrize("stepped", [False, True])
def test_on_a_device_that_is_not_here_the_optimizer_steps_as_it_would_there(name, stepped):
    parameters = make_parameters(shapes=[(64, 65), (5,)] * 6)
    make, there = getattr(torch.optim, name), torch.device("cuda", 0)
    optimizer = make(parameters, lr=0.1)
    if stepped:
        set_gradients(parameters)
        optimizer.step()
    found = optimizer_footprint(optimizer, parameters, there)
    here = optimizer_footprint(optimizer, parameters)
    assert found.state_bytes % 512 == found.step_peak_bytes % 512 == 0
    assert found.existing_state_bytes == here.existing_state_bytes
    if name == "AdamW":
        # Steps counted on the CPU; two moments; the one temporary of all parameters that foreach makes.
        moments = [allocated_bytes(p.nbytes, there) for p in parameters]
        assert found.state_bytes == 2 * sum(moments) and found.step_peak_bytes >= sum(moments)
        alone = optimizer_footprint(make(parameters, foreach=False), parameters, there)
        assert here.step_peak_bytes <= alone.step_peak_bytes < found.step_peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_cuda(make):
    parameters = [
        torch.nn.Parameter(p.detach().cuda()) for p in make_parameters(shapes=[(256, 1024), (1024,), (64, 256)])
    ]
    set_gradients(parameters)
    real = make(parameters)
    if isinstance(real, torch.optim.Adagrad) and real.defaults["fused"]:
        pytest.skip("torch has no such kernel on CUDA")
    footprint = optimizer_footprint(real, parameters)
    for _ in range(10):
        real.step()
    held = {t.untyped_storage()._cdata: t for s in real.state.values() for t in s.values() if torch.is_tensor(t)}
    assert footprint.state_bytes == sum(allocated_bytes(t.nbytes, t.device) for t in held.values() if t.is_cuda)
    measured = measure(real.step, device="cuda")
    assert abs(footprint.step_peak_bytes - measured.peak_bytes) <= max(0.02 * measured.peak_bytes, 8192)
