"""Calls of other sizes than the first are captured with symbols, without being asked to; and where they are not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition

import memopt
from memopt.backends.aten import AtenBackend
from memopt.capture.at_sizes import at_sizes
from memopt.engine import ManySizes
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.symbols import hints_of
from tests.inductor.test_peak_lower_bound import needs_compiler

pytestmark = pytest.mark.usefixtures("own_caches")


class Interpreted(AtenBackend):
    """Runs graphs with symbols as Dynamo made them, as far as there is room for their rows; and notes their inputs."""

    many_sizes = True

    def __init__(self, rows=100):
        self.rows, self.graphs = rows, []

    def compile_symbolic(self, graph_module, example_inputs, hooks):
        symbols = [place for place, value in enumerate(example_inputs) if isinstance(value, torch.SymInt)]
        self.graphs.append(len(symbols))

        def count(args):
            if any(args[place] > self.rows for place in symbols):
                raise SizesError("there is no room", others=True)

        def cut(joint, joint_inputs, *, num_fwd_outputs, **options):
            hooks.rewrite(at_sizes(joint, hints_of(example_inputs)), num_fwd_outputs)
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

        lower = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=as_it_is, partition_fn=cut)
        return ManySizes(count, lower(graph_module, example_inputs))


def as_it_is(module, _):
    return make_boxed_func(module.forward)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x, y=None):
        x = self.layer(self.drop(x)).tanh()
        return x.square().mean() if y is None else (x - y).square().mean()


def agrees(run, model, twin, *inputs, **others):
    """Losses, gradients and random numbers afterwards are eager's."""
    found = []
    for each, gradients in ((run, model), (twin, twin)):
        torch.manual_seed(7)
        gradients.zero_grad()
        loss = each(*inputs, **others)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in gradients.parameters()], torch.rand(1)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def made(engine=None, **options):
    model = Net()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, backend=engine or Interpreted(), **options)
    return run, lambda *args, **kwargs: agrees(run, model, twin, *args, **kwargs)


def said(caplog):
    """Lines of memopt's own."""
    return [record.getMessage() for record in caplog.records if record.name == "memopt"]


def graphs_of(run):
    return run._memopt.sessions.graphs


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_the_first_size_has_a_plan_and_all_others_share_a_graph(budget):
    engine = Interpreted()
    run, same = made(engine, budget=budget)
    for rows in (8, 5, 9, 8, 5, 30, 8):
        same(torch.randn(rows, 4))
    assert graphs_of(run) == 2 and engine.graphs == [1] and run.report.notes == ()


def test_sizes_that_do_not_vary_are_no_symbols_and_others_become_some():
    engine = Interpreted()
    run, same = made(engine)
    for shape in ((8, 3, 4), (8, 5, 4), (8, 6, 4), (7, 5, 4), (6, 6, 4)):
        same(torch.randn(shape))
    assert engine.graphs == [1, 2] and graphs_of(run) == 3


def test_sizes_that_happen_to_be_equal_are_symbols_of_their_own():
    engine = Interpreted()
    run, same = made(engine)
    for shape in ((8, 3, 4), (6, 6, 4), (5, 7, 4), (4, 3, 4)):
        same(torch.randn(shape))
    assert engine.graphs == [2] and graphs_of(run) == 2


def test_one_row_has_a_graph_of_its_own():
    engine = Interpreted()
    run, same = made(engine)
    for rows in (8, 1, 5, 1, 9):
        same(torch.randn(rows, 4))
    assert graphs_of(run) == 3 and engine.graphs == [1]


def test_other_arguments_are_another_form():
    engine = Interpreted()
    run, same = made(engine)
    for rows in (8, 5):
        same(torch.randn(rows, 4))
        same(torch.randn(rows, 4), y=torch.randn(rows, 4))
    assert graphs_of(run) == 4 and engine.graphs == [1, 1]  # a symbol that both tensors share


def test_views_and_the_same_tensor_twice():
    run, same = made()
    whole = torch.randn(12, 4)
    for rows in (8, 5, 9):
        same(whole[:rows], y=whole[:rows])
        x = torch.randn(rows, 4)
        same(x, y=x)
    assert graphs_of(run) <= 4


def test_marked_sizes_are_symbols_at_once():
    engine = Interpreted()
    run, same = made(engine)
    for rows in (8, 5, 9):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        same(x)
    assert graphs_of(run) == 1 and engine.graphs == [1]


def test_a_fraction_is_of_a_step_that_was_planned():
    engine = Interpreted()
    run, same = made(engine, budget=1.0)
    for rows in (8, 5):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        same(x)
    assert graphs_of(run) == 2


def test_it_may_be_forbidden():
    engine = Interpreted()
    run, same = made(engine, dynamic=False)
    for rows in (8, 5, 9):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        same(x)
    assert graphs_of(run) == 3 and not engine.graphs


def test_sizes_without_room_are_planned_by_themselves_and_smaller_ones_go_on(caplog):
    engine = Interpreted(rows=10)
    run, same = made(engine, budget="1MB")
    for rows in (8, 5, 20, 30, 9, 20, 30, 5):
        same(torch.randn(rows, 4))
    assert engine.graphs == [1] and graphs_of(run) == 4
    assert [note for note in run.report.notes if "no room" in note] and not said(caplog)


@pytest.mark.parametrize("error", [RuntimeError("of the compiler"), SizesError("there is no such code")])
def test_what_fails_with_symbols_is_planned_without_and_draws_no_random_numbers(error, caplog):
    class Failing(Interpreted):
        def compile_symbolic(self, graph_module, example_inputs, hooks):
            self.graphs.append(0)
            torch.rand(3)
            raise error

    engine = Failing()
    run, same = made(engine)
    for rows in (8, 5, 9, 8, 5):
        same(torch.randn(rows, 4))
    assert engine.graphs == [0] and len(run.report.notes) == 1 and not said(caplog)


def test_an_error_of_the_models_own_comes_through_and_other_sizes_go_on():
    engine = Interpreted()
    run, same = made(engine)
    same(torch.randn(8, 4))
    with pytest.raises(RuntimeError):
        run(torch.randn(8, 5))
    for rows in (5, 9):
        same(torch.randn(rows, 4))
    assert len(engine.graphs) <= 2


def test_many_sizes_that_are_planned_by_themselves_are_told_once(caplog):
    _, same = made(AtenBackend())
    for rows in range(2, 14):
        same(torch.randn(rows, 4))
    lines = [record.getMessage() for record in caplog.records if "pad the inputs" in record.getMessage()]
    assert len(lines) == 1 and "'aten' makes no code for many sizes" in lines[0]


def test_gradients_that_add_up_have_symbols_at_once():
    engine = Interpreted()
    model = Net().eval()
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "1MB", backend=engine)
    for rows in (8, 5, 9, 6):
        for micro in range(2):
            x = torch.randn(rows + micro, 4)
            run(x).backward()
            twin(x).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        model.zero_grad()
        twin.zero_grad()
    assert graphs_of(run) == 3 and len(engine.graphs) == 2


def test_a_size_that_was_planned_ahead_is_the_first():
    engine = Interpreted()
    run, same = made(engine, example_inputs=torch.randn(9, 4))
    for rows in (9, 7, 5, 6):
        same(torch.randn(rows, 4))
    assert engine.graphs == [1] and graphs_of(run) == 2


@pytest.mark.parametrize("options", [{}, {"budget": "1MB"}, {"budget": 1.0}, {"dynamic": True}])
def test_calls_without_gradients_too(options):
    engine = Interpreted()
    model = Net().eval()
    run = memopt.compile(model, backend=engine, **options)
    for context in (torch.no_grad, torch.inference_mode):
        for rows in (8, 5, 9, 8, 5, 30, 8):
            with context():
                x = torch.randn(rows, 4)
                torch.testing.assert_close(run(x), model(x))
    assert len(engine.graphs) in (1, 2) and run.report.notes == ()


def test_evaluation_between_steps():
    engine = Interpreted()
    run, same = made(engine, budget="1MB")
    model = run._memopt.model
    for rows in (8, 5, 9):
        run.train()
        same(torch.randn(rows, 4))
        run.eval()
        with torch.no_grad():
            x = torch.randn(rows + 2, 4)
            torch.testing.assert_close(run(x), model(x))
    assert len(engine.graphs) == 2 and graphs_of(run) == 4


class Cache:
    """Keys of what was called before, as libraries have them: an object."""

    def __init__(self):
        self.layers = [None, None]


class Cached(nn.Module):
    """Tokens look at those before them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids, cache):
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            keys = layer(x)
            if cache.layers[number] is not None:
                keys = torch.cat([cache.layers[number], keys], 1)
            cache.layers[number] = keys
            x = x + (x @ keys.mT).softmax(-1) @ keys
        return x @ self.embedding.weight.mT

    @torch.no_grad()
    def generate(self, ids, count):
        cache, found = Cache(), [ids]
        for _ in range(count):
            found.append(self(found[-1], cache)[:, -1:].argmax(-1))
        return torch.cat(found, 1)


@pytest.mark.parametrize("budget", [None, "1MB"])
def test_tokens_one_after_the_other_are_two_graphs(budget):
    engine = Interpreted()
    torch.manual_seed(0)
    model = Cached().eval()
    run = memopt.compile(model, budget, backend=engine)
    for shape, graphs in (((2, 8), 2), ((2, 8), 2), ((2, 5), 3), ((2, 6), 3)):  # 8 is what a key is wide
        ids = torch.randint(0, 16, shape)
        assert torch.equal(run.generate(ids, 6), model.generate(ids, 6))
        assert graphs_of(run) == graphs
    assert engine.graphs[0] >= 1 and run.report.notes == ()


def test_the_methods_of_engines_that_plan_each_size_are_the_models():
    model = Cached().eval()
    run = memopt.compile(model, backend="aten")
    ids = torch.randint(0, 16, (2, 4))
    assert torch.equal(run.generate(ids, 3), model.generate(ids, 3))
    assert graphs_of(run) == 0


@pytest.mark.quick("GPT2")
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_transformers_generates_with_two_graphs(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = getattr(transformers, f"{name}Config")(vocab_size=32, bos_token_id=1, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else "LlamaForCausalLM")(config).eval()
    run = memopt.compile(model, "5MB", backend=Interpreted())
    ids = torch.randint(2, 32, (2, 7))
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(run.generate(ids, **asked), model.generate(ids, **asked))
    assert graphs_of(run) == 2


@needs_compiler
def test_inductors_code_of_the_default_engine():
    torch.manual_seed(0)
    model = Net().eval()
    twin = copy.deepcopy(model)
    run, peaks = memopt.compile(model, "1MB"), []
    for rows in (8, 5, 16, 7):
        agrees(run, model, twin, torch.randn(rows, 4))
        peaks.append(run.report.peak_bytes)
    assert graphs_of(run) == 2 and peaks[2] == peaks[3] == max(peaks)
