from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.errors import ShortOfMemoryError
from memopt.step.backward_entry import BackwardFacts, InPart

COMPILER = missing_compiler(torch.device("cpu")) is None
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not COMPILER, reason="no C++ compiler"))


class Block(nn.Module):
    """Values that are quickly computed of a product, of a weight as large as they are, and of small ones."""

    def __init__(self):
        super().__init__()
        self.product, self.norm = nn.Linear(64, 64, bias=False), nn.LayerNorm(64)
        self.wide, self.bias = nn.Parameter(torch.rand(512, 64)), nn.Parameter(torch.randn(64))

    def forward(self, x):
        return self.norm(torch.tanh(self.product(x * self.wide) + self.bias))


@pytest.fixture(scope="module")
def tight():
    """A model, its stand-in that recomputes much, and a batch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(512, 64)
    compiled = memopt.compile(model, "72%", backend="aten", verify=False)
    compiled(x).square().mean().backward()
    return model, compiled, x


def _gradients(model, called, x, write):
    state = copy.deepcopy(model.state_dict())
    batch = x.clone()
    model.zero_grad()
    try:
        loss = called(batch).square().mean()
        write(model, batch)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]
    finally:
        model.load_state_dict(state)


def _each(end, change):
    """Change the parameters of all blocks whose name ends so."""

    def write(model, batch):
        for name, parameter in model.named_parameters():
            if name.endswith(end):
                change(parameter)

    return write


@torch.no_grad()
def _add(tensor):
    tensor.add_(1)


def _swap(tensor):
    tensor.data = torch.ones_like(tensor)


def _move(tensor):
    tensor.data = tensor.data.clone()


HARMLESS = {
    "biases by their data": _each(".bias", lambda tensor: tensor.data.add_(1)),
    "biases that lie elsewhere": _each(".bias", _swap),
    "scales by their data": _each("norm.weight", lambda tensor: tensor.data.mul_(2)),
    "weights that lie elsewhere with equal values": _each("product.weight", _move),
    "nothing": lambda model, batch: None,
}
REFUSED = {
    "weights by their data": (_each("wide", lambda tensor: tensor.data.mul_(1.5)), "parameter '.*wide'"),
    "weights that are clipped": (_each("wide", lambda tensor: tensor.data.clamp_(0.1, 0.9)), "parameter '.*wide'"),
    "weights in place": (_each("wide", _add), "parameter '.*wide'"),
    "weights that lie elsewhere": (_each("wide", _swap), "parameter '.*wide'"),
    "the batch by its data": (lambda model, batch: batch.data.zero_(), "input args\\[0\\]"),
    "the batch in place": (lambda model, batch: batch.zero_(), "input args\\[0\\]"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_eager_does_not_read_may_be_written_between_forward_and_backward(tight, what) -> None:
    model, compiled, x = tight
    expected = _gradients(model, model, x, HARMLESS[what])
    for first, second in zip(_gradients(model, compiled, x, HARMLESS[what]), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("what", REFUSED)
def test_what_backward_recomputes_activations_from_may_not(tight, what) -> None:
    model, compiled, x = tight
    write, name = REFUSED[what]
    with pytest.raises(RuntimeError, match=f"{name} was changed between forward and backward, which recomputes"):
        _gradients(model, compiled, x, write)
    _gradients(model, compiled, x, HARMLESS["nothing"])


class Layers(nn.Module):
    """Linear layers, whose weights eager reads through views, and a scale and a buffer that it reads as they are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)])
        self.scale = nn.Parameter(torch.ones(32))
        self.register_buffer("wave", torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        return (self.layers(x) * self.scale * self.wave).sin().mean(0)


@pytest.fixture(scope="module", params=[None, 0.6], ids=["kept", "recomputed"])
def layers(request):
    """A model, its stand-in, and a batch."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4096, 32)
    compiled = memopt.compile(model, request.param, backend="aten", verify=False)
    compiled(x).square().mean().backward()
    return model, compiled, x


def _write(name, change):
    def write(model, batch):
        change(model.get_parameter(name) if name != "wave" else model.wave)

    return write


@pytest.mark.parametrize("name", ["layers.2.0.weight", "scale", "wave"])
def test_what_backward_reads_is_what_it_is_then_whichever_plan_recomputes_beside_it(layers, name) -> None:
    """Backward's own products may be put off, or done twice: they read the weight and not forward's copy of it."""
    model, compiled, x = layers
    write = _write(name, lambda tensor: tensor.data.mul_(0.5))
    expected = _gradients(model, model, x, write)
    for first, second in zip(_gradients(model, compiled, x, write), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["layers.2.0.weight", "scale", "wave"])
def test_what_is_given_other_memory_is_eagers_or_refused(layers, name) -> None:
    """Eager reads views of a weight as they were, and a scale as it is: a plan cannot tell, and its copies neither."""
    model, compiled, x = layers
    before = model.wave

    def swap(tensor):
        tensor.data = torch.full_like(tensor, 0.03)

    try:
        expected = _gradients(model, model, x, _write(name, swap))
        try:
            found = _gradients(model, compiled, x, _write(name, swap))
        except RuntimeError as error:
            assert re.fullmatch(
                rf"(parameter|buffer) '{name}' was given other memory between forward and backward .*, and recomputes "
                r"from it: change it after backward\(\), or call the original model in such a step",
                str(error),
            )
        else:
            assert name != "layers.2.0.weight"
            for first, second in zip(found, expected, strict=True):
                torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)
    finally:
        model.wave = before
    _gradients(model, compiled, x, HARMLESS["nothing"])


def test_memory_that_runs_out_while_inputs_are_looked_at_is_one_clear_line(tight, monkeypatch) -> None:
    model, compiled, x = tight

    def full(value):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB.\nSee")

    def write(model, batch):
        monkeypatch.setattr("memopt.step.backward_entry.fingerprint_of", full)

    with pytest.raises(MemoryError, match=r"memory ran out in a step planned to take .* 2\.00 GiB") as error:
        _gradients(model, compiled, x, write)
    assert type(error.value) is ShortOfMemoryError and "\n" not in str(error.value)
    monkeypatch.undo()
    _gradients(model, compiled, x, HARMLESS["nothing"])


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_a_bias_may_be_written_where_torchs_own_partition_recomputes_from_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), torch.randn(512, 64)
    compiled = memopt.compile(model, backend="inductor", verify=False)

    def write(model, batch):
        model[0].bias.data.add_(1)
        with torch.no_grad():
            model[2].bias.add_(1)

    expected = _gradients(model, model, x, write)
    for first, second in zip(_gradients(model, compiled, x, write), expected, strict=True):
        torch.testing.assert_close(first, second)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, y):
        h = torch.relu(self.body(x))
        return self.first(h), {"second": self.second(h) + y, "flat": self.second.weight.view(-1)}


LOSSES = {
    "first": lambda a, b: a.square().mean(),
    "second": lambda a, b: b["second"].square().mean(),
    "view": lambda a, b: b["flat"].sum(),
    "both": lambda a, b: a.sum() + b["second"].sum(),
}


@pytest.mark.quick("None-aten")
@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_a_head_that_the_loss_does_not_use_has_no_gradient(backend, budget) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 8)
    compiled = memopt.compile(model, budget, backend=backend, verify=False)
    for name in (*LOSSES, "first"):
        for accumulate in (False, True):
            y = torch.randn(4, requires_grad=True)
            found = []
            for called in (model, compiled):
                model.zero_grad()
                y.grad = None
                for loss in ("first", name) if accumulate else (name,):
                    LOSSES[loss](*called(x, y)).backward()
                found.append([None if item.grad is None else item.grad.clone() for item in (*model.parameters(), y)])
            for first, second in zip(*found, strict=True):
                assert (first is None) == (second is None), (name, accumulate)
                if first is not None:
                    torch.testing.assert_close(first, second)


def test_gradients_that_are_asked_for_and_not_there_are_unused() -> None:
    model, x = Heads(), torch.randn(5, 8)
    compiled = memopt.compile(model, backend="aten", verify=False)
    first, _ = compiled(x, torch.zeros(4))
    assert torch.autograd.grad(first.sum(), model.second.weight, allow_unused=True) == (None,)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
def test_a_graph_may_be_kept_for_another_backward_after_one_that_was_not(backend) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3)])
    compiled, x = memopt.compile(model, backend=backend, verify=False), torch.randn(16, 32)
    compiled(x).sum().backward()
    found = []
    for called in (model, compiled):
        model.zero_grad()
        y = called(x)
        y[:, :3].sum().backward(retain_graph=True)
        y.pow(3).mean().backward(retain_graph=True)
        y[3].sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
def test_a_second_derivative_is_refused(backend) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8, requires_grad=True)
    compiled = memopt.compile(model, backend=backend, verify=False)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="first derivatives only: call the original model"):
        gradient.norm(2).backward()


def test_facts_are_read_as_they_were_written() -> None:
    facts = BackwardFacts(2, ((0, 1), None), ((3, "parameter 'a'"),), (InPart(4, "input x", (1,), True),), without=(5,))
    assert BackwardFacts.of_list(facts.listed()) == facts


class Keys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.queue = nn.Linear(16, 16), nn.Buffer(torch.randn(16, 64))

    def forward(self, x):
        return torch.tanh(self.query(x) @ self.queue.clone().detach())


@pytest.mark.parametrize("backend", ["aten", INDUCTOR])
def test_what_the_model_copies_itself_is_read_as_it_was(backend) -> None:
    torch.manual_seed(0)
    model, x = Keys(), torch.randn(8, 16)
    compiled = memopt.compile(model, backend=backend, verify=False)

    def enqueue(model, batch):
        with torch.no_grad():
            model.queue[:, :32] = 0

    expected = _gradients(model, model, x, enqueue)
    for first, second in zip(_gradients(model, compiled, x, enqueue), expected, strict=True):
        torch.testing.assert_close(first, second)
