"""Device work that begins before the guards are asked: its results are taken only by the call that it was begun for."""

import gc
import threading

import pytest
import torch
from torch import nn

import memopt
from memopt.backends import cuda_graph
from memopt.backends.static import StaticBackend
from memopt.calls.guard_fast_path import Kind
from memopt.inductor import inference
from tests.calls import test_guard_fast_path, test_guard_fast_path_changes
from tests.calls.test_guard_fast_path import Plain, image, in_threads, net, same


class Graph:
    """What a CUDA graph is to `Replay`, on CPU: reads and writes always the same memory."""

    def __init__(self, run, inputs, outputs, replays):
        self.run, self.inputs, self.outputs, self.replays = run, inputs, outputs, replays

    def replay(self):
        self.replays.append(threading.get_ident())
        for place, value in zip(self.outputs, self.run(*self.inputs), strict=True):
            place.copy_(value)


@pytest.fixture
def replays(monkeypatch):
    """`backend="inductor"` replays graphs, and here each replay is listed."""
    found = []

    def capture(self, values):
        self._inputs = [value.clone() if index in self._copied else value for index, value in enumerate(values)]
        self._outputs = [value.clone() for value in self._run(*self._inputs)]
        self._graph = Graph(self._run, self._inputs, self._outputs, found)

    torch._dynamo.reset()
    monkeypatch.setattr(inference, "_reason_against", lambda *_: "")
    monkeypatch.setattr(cuda_graph.Replay, "_capture", capture)
    return found


@pytest.fixture
def early(monkeypatch):
    """Whether each call that began early has had its results taken."""
    found, taken = [], cuda_graph.Replay.was_used

    def noted(self):
        found.append(taken(self))
        return found[-1]

    monkeypatch.setattr(cuda_graph.Replay, "was_used", noted)
    return found


def steady(model, *args, **kwargs):
    """The compiled model, whose next such call begins early."""
    compiled = memopt.compile(model, backend="inductor")
    for _ in range(3):
        same(compiled, model, *args, **kwargs)
    return compiled


def test_a_call_like_the_last_is_computed_once(replays, early):
    model, x = net(), image()
    compiled = steady(model, x)
    replays.clear(), early.clear()
    for _ in range(3):
        same(compiled, model, image())
    same(compiled, model, x)
    assert len(replays) == 4 and early == [True] * 4
    with torch.no_grad():
        held = [compiled(x), compiled(x + 1)]
    torch.testing.assert_close(held[0], model(x))


def test_arguments_by_name(replays, early):
    model, x = net(), image()
    compiled = steady(model, x=x, extra=torch.randn(4, dtype=torch.float64))
    early.clear()
    for _ in range(2):
        same(compiled, model, x=image(), extra=torch.randn(4, dtype=torch.float64))
    same(compiled, model, image(), extra=torch.randn(4, dtype=torch.float64))
    assert early == [True] * 2


@pytest.mark.long
def test_weights_that_change_are_seen(replays, early):
    test_guard_fast_path_changes.test_weights_that_change_are_seen("inductor")
    assert True in early


@pytest.mark.long
def test_inputs_that_change_are_seen(replays):
    test_guard_fast_path_changes.test_inputs_that_change_are_seen("inductor")


def test_what_a_model_writes_to_itself_is_written(replays):
    model, x = test_guard_fast_path.Counts(), torch.randn(2, 4)
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        for number in range(1, 6):
            found = compiled(x)
            torch.testing.assert_close(model.total, number * x.sum(0))
            torch.testing.assert_close(found["total"], model.total)


class Adds(test_guard_fast_path.Counts):
    """Writes to itself, by a factor that guards look at."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return super().forward(x * self.factor)


def test_what_was_begun_in_vain_has_written_nothing(replays, early):
    model, x, total = Adds(), torch.randn(2, 4), torch.zeros(4)
    compiled = memopt.compile(model, backend="inductor")
    with torch.no_grad():
        for factor in (1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 2.0):
            model.factor = factor
            found = compiled(x)
            total += factor * x.sum(0)
            torch.testing.assert_close(model.total, total)
            torch.testing.assert_close(found["total"], total)
            model.last = None
    assert True in early and False in early


def test_a_call_that_goes_another_way_drops_what_was_begun(replays, early):
    model, x = net(), image()
    compiled = steady(model, x)
    early.clear()
    model.scale = 5.0  # the guards see it, the tensors do not show it
    same(compiled, model, x)
    assert early == [False]
    same(compiled, model, x)
    model.scale = 3.0
    same(compiled, model, x)
    model.drop.train()
    with torch.no_grad():
        assert not torch.equal(compiled(x), compiled(x))
    model.drop.eval()
    same(compiled, model, x)


def test_after_a_start_in_vain_there_is_a_rest(replays, early):
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    handle = model.register_forward_hook(lambda module, args, output: output * 2)
    early.clear()
    for _ in range(4):
        same(compiled, model, x)
    handle.remove()
    assert early == [False]
    for _ in range(40):
        same(compiled, model, x)
    assert early[1:].count(True) > 20 and False not in early[1:]


def test_a_call_that_fails_lets_others_in(replays, early):
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    graph = compiled._memopt.fast_path._known[Kind(gradients=False, accumulating=False)].graphs[0]
    early.clear()

    def fail(*args):
        raise RuntimeError("failed")

    call, graph.call = graph.call, fail
    with torch.no_grad(), pytest.raises(RuntimeError, match="failed"):
        compiled(x)
    graph.call = call
    assert early == [False]
    thread = threading.Thread(target=same, args=(compiled, model, x))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    graph.holds = fail
    for _ in range(20):
        with torch.no_grad(), pytest.raises(RuntimeError, match="failed"):
            compiled(x)
    del graph.holds
    thread = threading.Thread(target=same, args=(compiled, model, x))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_weights_elsewhere_are_not_read_where_they_were(replays, early):
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    early.clear(), replays.clear()
    model.linear.weight.data = torch.randn(4, 4)
    same(compiled, model, x)
    assert early == []  # nothing was begun: the memory may be gone
    same(compiled, model, x)
    assert early == [True]


@pytest.mark.long
def test_inference_mode_and_default_devices(replays):
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    with torch.device("cpu"):
        same(compiled, model, x)
    same(compiled, model, x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert compiled(x).dtype == torch.bfloat16
    same(compiled, model, x)


def test_threads_may_call_together(replays):
    model = net()
    inputs = [image(), image(1, 2, 6, 6)]
    compiled = memopt.compile(model, backend="inductor")
    for x in inputs:
        same(compiled, model, x)

    def work(x):
        for _ in range(50):
            same(compiled, model, x + torch.rand(()).double())

    assert in_threads(work, inputs * 2) == []


@pytest.mark.parametrize("moved", [True, False])
def test_what_a_graph_holds_is_given_back_with_the_compiled_model(replays, monkeypatch, moved):
    released, release = [], cuda_graph.Replay.release
    monkeypatch.setattr(cuda_graph.Replay, "release", lambda self: released.append(self) or release(self))
    model, x = Plain().eval(), torch.randn(2, 4)
    compiled = steady(model, x)
    gc.collect()  # what others left behind
    released.clear()
    if moved:
        compiled.double()
    else:
        del compiled
        gc.collect()  # Dynamo keeps the code as long as the model
    assert [replay._graph for replay in released] == [None]


class Alone(nn.Module):
    def forward(self, x):
        return x.sin()


def test_a_new_function_is_found_once_the_old_one_is_gone(replays, early):
    model, x = Alone(), image()
    compiled = steady(model, x)
    early.clear()
    torch._dynamo.reset()
    for _ in range(5):
        same(compiled, model, x)
    assert early and all(early)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("backend", ["inductor", StaticBackend(graphs=True)], ids=["inductor", "static"])
def test_a_graph_on_a_gpu_begins_early(early, backend):
    torch._dynamo.reset()
    model, x = net().float().cuda(), image(4, 2, 32, 32).float().cuda()
    compiled = memopt.compile(model, backend=backend)
    for _ in range(4):
        same(compiled, model, x, tolerance=1e-3)
    assert early and all(early)
    early.clear()
    for _ in range(2):
        x = image(4, 2, 32, 32).float().cuda()
        same(compiled, model, x, tolerance=1e-3)
        with torch.no_grad():
            model.head.weight.mul_(0.5)
            model.conv.weight.add_(0.1)
        same(compiled, model, x, tolerance=1e-3)
        model.head.weight.data = torch.randn(4, 3, device="cuda")
        torch.cuda.empty_cache()
        same(compiled, model, x, tolerance=1e-3)
    assert True in early
    with torch.no_grad():
        held = [(compiled(x + step), model(x + step)) for step in range(4)]
    for found, expected in held:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    model.scale = 5.0
    same(compiled, model, x, tolerance=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_other_streams_and_threads_on_a_gpu():
    torch._dynamo.reset()
    model, x = net().float().cuda(), image(4, 2, 32, 32).float().cuda()
    compiled = memopt.compile(model, backend="inductor")
    same(compiled, model, x, tolerance=1e-3)

    def work(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                same(compiled, model, torch.randn_like(x), tolerance=1e-3)

    assert in_threads(work, [x] * 4) == []
