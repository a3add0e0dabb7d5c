"""Running operators by themselves."""

import itertools
import types

import pytest
import torch

from memopt.memory.cost import measure as measure_module
from memopt.memory.cost.measure import bytes_needed, calibrate, clock_bytes, measure_operators
from memopt.memory.cost.scratch import most_workspace_bytes
from tests.memory.cost.build import GEOMETRY, aten, call

CPU = torch.device("cpu")
LIMIT = 2**31


def product(size):
    return call(aten.mm.default, torch.randn(size, size), torch.randn(size, size))


def test_heavy_operators_are_timed_and_light_ones_are_not():
    heavy, light = measure_operators([product(64), call(aten.relu.default, torch.randn(64))], CPU, LIMIT)
    assert heavy.seconds > 0 and heavy.output_bytes == 4 * 64 * 64
    assert light.seconds is None and light.output_bytes == 4 * 64


@pytest.fixture
def slowed(monkeypatch):
    """A node whose calls take the seconds in turn, by a clock of their own, and a list of (seconds, profiled)."""
    now, calls = [0.0], []

    def make(*seconds):
        turns = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def target(*args):
            calls.append((next(turns), torch._C._autograd._profiler_enabled()))
            now[0] += calls[-1][0]
            return aten.mm.default(*args)

        node = product(4)
        node.target = target
        return node, calls

    monkeypatch.setattr(measure_module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return make


def test_the_time_is_the_least_of_calls_outside_the_profiler(slowed):
    node, calls = slowed(0.04, 0.02, 0.01, 0.003, 0.001, 0.002, 0.01)  # most calls are disturbed
    (found,) = measure_operators([node], CPU, LIMIT)
    assert [profiled for _, profiled in calls] == [True] * 2 + [False] * 5
    assert found.seconds == pytest.approx(0.001)


def test_slow_operators_are_called_less_often(slowed):
    node, calls = slowed(0.03)
    (found,) = measure_operators([node], CPU, LIMIT)
    assert len(calls) == 2 + 2 and found.seconds == pytest.approx(0.03)


def test_a_long_operator_runs_once_only(slowed):
    node, calls = slowed(0.06)
    (found,) = measure_operators([node], CPU, LIMIT)
    assert calls == [(0.06, True)] and found.seconds == pytest.approx(0.06)


def test_buffers_stay_within_the_limit(monkeypatch):
    nodes = [product(size) for size in (100, 10, 100, 10)]
    nodes.insert(2, call(aten.mm.default, *(torch.randn(100, 100, dtype=torch.float64) for _ in range(2))))
    limit = max(map(bytes_needed, nodes)) + 20_000
    held = []
    inputs = measure_module._Inputs

    class Watched(inputs):
        def __init__(self, nodes):
            super().__init__(nodes)
            held.append((len(nodes), sum(buffer.nbytes for buffer in self.buffers.values())))

    monkeypatch.setattr(measure_module, "_Inputs", Watched)
    found = measure_operators(nodes, CPU, limit)
    assert all(cost is not None for cost in found)
    assert [count for count, _ in held] == [2, 1, 2] and all(size < limit for _, size in held)
    held.clear()
    assert [cost.workspace_bytes for cost in measure_operators(nodes, CPU, LIMIT)] == [
        cost.workspace_bytes for cost in found
    ]
    assert [count for count, _ in held] == [5]


def test_what_operators_take_beside_is_within_the_limit_as_well(monkeypatch):
    """Convolutions reorder what they read and write: runs of them in one go were over what planning may take."""
    nodes = [call(aten.convolution.default, *operands(size)) for size in (4, 3)]
    limit, held = max(map(bytes_needed, nodes)) + 20_000, []
    measured = measure_module._measure_group
    monkeypatch.setattr(
        measure_module, "_measure_group", lambda nodes, device: [held.append(len(nodes)), *measured(nodes, device)][1:]
    )
    for more, groups in ((0, [1, 1]), (max(map(most_workspace_bytes, nodes)), [2])):
        measure_operators(nodes, CPU, limit + more)
        assert held == groups
        held.clear()


def operands(size):
    image, weight = torch.randn(size, 8, 16, 16), torch.randn(8, 8, 3, 3)
    return image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def test_equal_operands_are_one_tensor_and_integers_are_valid_indices():
    seen = []

    def spy(*args):
        seen.append(args)
        return aten.embedding.default(*args)

    node = call(aten.embedding.default, torch.randn(9, 4), torch.full((5,), 8))
    node.target = spy
    measure_operators([node], CPU, LIMIT)
    table, rows = seen[0]
    assert rows.tolist() == [0] * 5 and table.shape == (9, 4) and 0.1 <= table.min() <= table.max() <= 1


def test_autocast_gradients_and_fake_modes_do_not_reach_the_operators():
    seen = []

    def spy(*args):
        seen.append((torch.is_grad_enabled(), aten.mm.default(*args).dtype, type(args[0])))
        return aten.mm.default(*args)

    node = product(4)
    node.target = spy
    with torch.autocast("cpu", torch.bfloat16), torch._subclasses.FakeTensorMode():
        (found,) = measure_operators([node], CPU, LIMIT)
    assert set(seen) == {(False, torch.float32, torch.Tensor)} and found.output_bytes == 64


def test_a_generator_of_the_users_own_is_not_drawn_from():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    drawn = call(aten.randn.generator, [64, 64], generator=generator)
    assert measure_operators([drawn], torch.device("cpu"), 2**30) != [None]
    assert torch.equal(generator.get_state(), before)


def test_what_refuses_made_up_values_has_no_figures():
    nodes = [call(aten.linalg_cholesky.default, torch.eye(8)), product(4)]
    singular, good = measure_operators(nodes, CPU, LIMIT)
    assert singular is None and good is not None


def test_an_active_profiler_is_an_error():
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="profiler is active"):
        measure_operators([product(4)], CPU, LIMIT)


def test_calibration_measures_this_machine():
    state = torch.get_rng_state()
    found = calibrate(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    sizes, times = zip(*found.traffic, strict=True)
    assert list(sizes) == sorted(set(sizes)) and list(times) == sorted(times) and times[0] > 0
    assert found.type == "cpu" and found.reached == (1.0, 1.0, 1.0) and found.title
    assert all(rate > 1e6 for rate in found.flops.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_times_are_the_device_s():
    device = torch.device("cuda", torch.cuda.current_device())
    found = calibrate(device)
    # Between an old card's and a new one's.
    assert 5e12 < found.flops["float16"] < 5e15 and 1e11 < found.bytes_per_second < 2e13
    assert 5e-7 < found.traffic[0][1] < 1e-4 and clock_bytes(device) > 0
    half = torch.empty(4096, 4096, dtype=torch.float16, device=device)
    x, w = torch.empty(8, 64, 56, 56, device=device), torch.empty(64, 64, 3, 3, device=device)
    nodes = [call(aten.mm.default, half, half), call(aten.convolution.default, x, w, None, *GEOMETRY)]
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    first, second = measure_operators(nodes, device, 2**31), measure_operators(nodes, device, 2**31)
    assert torch.cuda.memory_reserved() <= held  # nothing is left with the allocator
    for one, other in zip(first, second, strict=True):
        assert one.seconds > 0 and other.seconds > 0
        assert one.workspace_bytes == other.workspace_bytes
    assert first[0].seconds > 0.5 * 2 * 4096**3 / found.flops["float16"]
