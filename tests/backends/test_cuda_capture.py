"""Graphs of a training step as CUDA graphs on a real device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.cuda_capture import CudaGraphCapturer
from memopt.cuda_graphs import steered_code, trial
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.signature import StepSignature
from memopt.cuda_graphs.step import CudaGraphStep, NotCapturable
from memopt.solve.placement import Placements
from tests.cuda_graphs.test_step import Waiting, check, step_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32")]


@pytest.fixture(autouse=True)
def _nothing_is_left_of_other_tests():
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def test_a_cuda_graph_draws_the_numbers_that_the_function_would():
    capturer = CudaGraphCapturer()
    x = torch.ones(1000, device="cuda")

    def run(args):
        (given,) = args
        args.clear()
        return [nn.functional.dropout(given, 0.5) * torch.rand_like(given)]

    torch.manual_seed(0)
    expected = [run([x])[0] for _ in range(3)]
    replay, (result,) = capturer.capture(run, [x])
    torch.manual_seed(0)
    for value in expected:
        replay()
        assert torch.equal(result, value)
    assert torch.equal(run([x])[0], run([x])[0]) is False


def test_numbers_that_were_drawn_in_vain_are_drawn_again():
    capturer = CudaGraphCapturer()
    x = torch.ones(1000, device="cuda")
    replay, (result,) = capturer.capture(lambda args: [torch.rand_like(args[0])], [x])
    torch.manual_seed(0)
    replay()
    expected, then = result.clone(), torch.rand_like(x)
    torch.manual_seed(0)
    place = capturer.drawn()
    replay()
    capturer.draw_from(place)
    replay()
    assert torch.equal(result, expected) and torch.equal(torch.rand_like(x), then)


def test_what_waits_for_the_device_is_refused_and_leaves_nothing_behind():
    capturer = CudaGraphCapturer()
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(0)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(0)
    with pytest.raises(NotCapturable):
        capturer.capture(lambda args: [args[0] * float(args[0].sum())], [x])
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    replay, (result,) = capturer.capture(lambda args: [args[0] * 2], [x])
    replay()
    assert torch.equal(result, 2 * x)
    del replay, result
    before = torch.cuda.memory_reserved()
    capturer.release()
    assert torch.cuda.memory_reserved() <= before


def test_nothing_is_captured_where_there_is_no_room_for_what_a_generator_needs():
    """PyTorch would end the process."""
    x, small, share = torch.ones(4, device="cuda"), [], torch.cuda.get_per_process_memory_fraction()
    with pytest.raises(NotCapturable):
        CudaGraphCapturer().capture(lambda args: [args[0] * float(args[0].sum())], [x])
    reserved = torch.cuda.memory_reserved()
    while torch.cuda.memory_reserved() == reserved:  # until no small block is free
        small.append(torch.empty(1, device="cuda"))
    small.pop()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        with pytest.raises(NotCapturable, match="out of memory"):
            CudaGraphCapturer().capture(lambda args: [args[0] * 2], [x])
    finally:
        torch.cuda.set_per_process_memory_fraction(share)
    run, results = CudaGraphCapturer().capture(lambda args: [args[0] * 2], [x])
    run()
    assert results[0].tolist() == [2.0] * 4


def test_what_waits_on_the_host_between_the_graphs_is_captured_with_them():
    code = Waiting()
    step, run = step_of(code, GraphPool(CudaGraphCapturer()))
    weight, count = torch.tensor(0.7, device="cuda", requires_grad=True), torch.zeros((), device="cuda")
    for number in range(5):
        if number == 1:
            step.start()
        check(run, weight, count, torch.randn(2**22, device="cuda"))
    assert not step.reason and count == 5
    assert code.calls == ["forward", "backward"] * 2, "the others are replayed"


def test_memory_of_an_argument_is_free_for_others_once_it_is_let_go_of():
    weight, x = torch.tensor(2.0, device="cuda"), torch.randn(2**23, device="cuda")

    def forward(args):
        given_weight, given = args
        args.clear()
        made = given * 3
        del given
        return [(made * given_weight).sum(), given_weight, made]  # what is summed lies where the argument did

    capturer = CudaGraphCapturer()
    step = CudaGraphStep(forward, forward, StepSignature(frozenset({0}), 1, 2), GraphPool(capturer))
    step.start()
    for scale in (1.0, -2.0):
        loss = step.forward([weight, scale * x])[0]
        torch.testing.assert_close(loss, scale * 6 * x.sum(), rtol=1e-3, atol=1e-1)
        step._pool.end()
    capturer.end()
    own = [item for item in torch.cuda.memory_snapshot() if tuple(item["segment_pool_id"]) == tuple(capturer._pool)]
    taken = [item["total_size"] for item in own]
    assert 2 * x.nbytes <= sum(taken) < 2.5 * x.nbytes
    del loss
    step.stop("enough")
    step._pool.release()


class Deep(nn.Module):
    """Many small layers, whose kernels end before the host has launched the next."""

    def __init__(self, layers=60, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(layers)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.drop(x.mean((2, 3)))).square().mean()


def trained(steps=6):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = memopt.compile(model, "1GB", backend="inductor", optimizer=optimizer)
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        torch.cuda.reset_peak_memory_stats()
        loss = run(torch.randn(16, 32, 16, 16, device="cuda"))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if number:
            assert torch.cuda.max_memory_reserved() <= run.report.budget_bytes
    return run, losses, [value.clone() for value in model.state_dict().values()]


class Pyramid(nn.Module):
    """Blocks of many sizes: between those that stay, free ones lie where the next does not fit."""

    def __init__(self, width=16, levels=4):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, padding=1) for i in range(levels))
        self.up = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 3, padding=1) for i in range(levels))

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(x)
            x = nn.functional.max_pool2d(torch.relu(layer(x)), 2)
        for layer in reversed(self.up):
            x = torch.relu(layer(nn.functional.interpolate(x, scale_factor=2))) + kept.pop()
        return x.square().mean()


def test_blocks_of_a_cuda_graph_lie_as_they_were_packed(monkeypatch):
    torch._dynamo.reset()
    model = Pyramid().cuda()
    x = torch.randn(8, 16, 256, 256, device="cuda")
    told, packed, place = [], [], Placements.place
    monkeypatch.setattr(steered_code.log, "info", lambda text, *args: told.append(text))
    monkeypatch.setattr(Placements, "place", lambda *args: packed.append(place(*args)) or packed[-1])
    monkeypatch.setattr(trial, "_WORTH", 1e9)
    monkeypatch.setattr(trial, "_WAITS", 0.0)
    run = memopt.compile(model, "4GB", backend="inductor")
    run(x).backward()
    assert any("CUDA graphs" in note for note in run.report.notes), run.report.notes
    assert not any("not steered" in text for text in told)
    torch.cuda.empty_cache()
    snapshot = torch.cuda.memory_snapshot()
    pool = sum(item["total_size"] for item in snapshot if tuple(item["segment_pool_id"]) != (0, 0))
    assert packed[0].arena_bytes <= pool <= packed[0].arena_bytes + 48 * 2**20  # small blocks, and cuBLAS's own


def test_a_step_that_waits_for_its_host_is_captured_and_trains_as_before(monkeypatch):
    run, losses, state = trained()
    assert any("CUDA graphs" in note for note in run.report.notes), run.report.notes
    monkeypatch.setattr(trial, "_WORTH", 0.0)
    plain, expected, other = trained()
    assert not any("captured as CUDA graphs" in note for note in plain.report.notes), plain.report.notes
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state, other, rtol=1e-2, atol=1e-3)
    x = torch.randn(16, 32, 16, 16, device="cuda")
    with torch.no_grad():
        run.eval()
        run(x)
        run.train()
    first, second = run(x), run(2 * x)  # two at a time
    (first + second).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in run.parameters())


def test_gradients_outlive_the_next_step_and_the_compiled_model():
    run, *_ = trained()
    x = torch.randn(16, 32, 16, 16, device="cuda")
    run(x).backward()
    parameters = list(run.parameters())
    held = [parameter.grad for parameter in parameters]
    known = [gradient.clone() for gradient in held]
    run.zero_grad()
    run(3 * x).backward()
    assert all(torch.equal(a, b) for a, b in zip(held, known, strict=True))
    known = [parameter.grad.clone() for parameter in parameters]
    del run
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((2**26,), 7.0, device="cuda")  # would take the memory
    assert all(torch.equal(parameter.grad, b) for parameter, b in zip(parameters, known, strict=True))


def test_a_compiled_model_may_be_let_go_of_while_the_device_works_on_its_step():
    """Segments that grow are unmapped without waiting for the stream that a CUDA graph is replayed on."""
    for _ in range(3):
        run, *_ = trained()
        parameters = list(run.parameters())
        x = torch.ones(16, 32, 16, 16, device="cuda")
        torch.cuda.synchronize()
        for _ in range(20):
            run.zero_grad()
            run(x).backward()
        held = [parameter.grad for parameter in parameters]
        del run
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        assert all(torch.isfinite(gradient).all() for gradient in held)


class Stack(nn.Module):
    """Layers none of whose kernels adds up in an order of its own: a CUDA graph does the same to the bit."""

    def __init__(self, normed, layers=12, width=256):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) if normed else nn.Identity() for _ in range(layers))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(nn.functional.gelu(norm(layer(x))), 0.1, self.training)
        return x.float().square().mean()


@pytest.mark.parametrize("normed", [False, True], ids=["writes nothing", "writes statistics"])
def test_a_step_begins_before_it_is_called_and_in_vain_where_it_is_another(monkeypatch, normed):
    took, end = [], CudaGraphStep.end
    monkeypatch.setattr(trial, "_WAITS", 0.0)
    monkeypatch.setattr(trial, "_WORTH", 1e9)
    monkeypatch.setattr(CudaGraphStep, "end", lambda self: took.append(end(self)) or took[-1])

    def losses():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Stack(normed).to("cuda", torch.bfloat16), torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        found = []
        run = memopt.compile(model, "2GB", backend="inductor")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        for number in range(12):
            if number == 8:  # the weights lie elsewhere now
                for parameter in model.parameters():
                    parameter.data = parameter.detach().clone()
            loss = run(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        assert any("CUDA graphs" in note for note in run.report.notes), run.report.notes
        return [*found, float(torch.rand((), device="cuda")), *(value.tolist() for value in model.buffers())]

    early = losses()
    assert True in took
    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphStep, "begin", lambda self, given: False)
        assert losses() == early
