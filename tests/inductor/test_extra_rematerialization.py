"""What torch's own cut saves though kernels can compute it again: by hand on small graphs, and in a real step."""

import pytest
import torch
from torch import nn

import memopt
from memopt.inductor import training as engine
from memopt.inductor.extra_rematerialization import rematerialize_saved
from memopt.inductor.partition import saved_bytes
from tests.inductor.test_peak_lower_bound import graph_of, needs_compiler

aten = torch.ops.aten
SIZE = 160  # values of 160 by 160 floats: 102,400 bytes
BYTES = 4 * SIZE * SIZE


def ahead(call, x, weight):
    first = call(aten.mm.default, x, weight)
    gate = call(aten.sigmoid.default, first)
    product = call(aten.mul.Tensor, gate, first)  # of what is saved
    second = call(aten.mm.default, product, weight)
    cosine = call(aten.cos.default, second)  # of what is not
    drawn = call(aten.mul.Tensor, cosine, call(aten.add.Tensor, product, weight))
    return [call(aten.mm.default, drawn, weight), first, product, drawn, cosine, weight]


@pytest.fixture
def cut():
    x, weight, tangent = (torch.randn(SIZE, SIZE) for _ in range(3))
    forward = graph_of({"x": x, "weight": weight}, ahead)
    _, *saved = forward.graph.output_node().args[0]
    given = dict(zip([node.name for node in saved], forward(x, weight)[1:], strict=True))

    def back(call, weight, first, product, drawn, cosine, tangent):
        found = [call(aten.mm.default, tangent, value) for value in (drawn, cosine, product)]
        return [*found, call(aten.mul.Tensor, first, tangent)]

    backward = graph_of({"weight": weight, **given, "tangents_1": tangent}, back)
    return forward, backward, (x, weight, tangent)


def run(forward, backward, x, weight, tangent):
    """All results of both graphs, saved values passed on by name."""
    made = forward(x, weight)
    names = [node.name for node in forward.graph.output_node().args[0]]
    known = {**dict(zip(names, made, strict=True)), "weight": weight, "tangents_1": tangent}
    results = backward(*(known[node.name] for node in backward.graph.find_nodes(op="placeholder")))
    return [made[0], *results]


def test_what_is_computed_of_other_saved_values_is_computed_again(cut):
    forward, backward, inputs = cut
    found = rematerialize_saved(forward, backward, 1, BYTES)
    assert found is not None
    for module in found:
        module.graph.lint()
    assert saved_bytes(found[0], 1) == saved_bytes(forward, 1) - BYTES
    names = {node.name for node in found[1].graph.find_nodes(op="placeholder")}
    assert len(names) == 5 and "mm_default" in names, "the product is recomputed of the matrix product"
    for got, known in zip(run(*found, *inputs), run(forward, backward, *inputs), strict=True):
        assert torch.equal(got, known)
    assert saved_bytes(forward, 1) == 4 * BYTES, "the cut itself stays"


def test_all_that_is_wanted_is_there_or_nothing_changes(cut):
    forward, backward, inputs = cut
    two = rematerialize_saved(forward, backward, 1, BYTES + 1)  # `drawn`, too: of `cosine` and the rest
    assert two is not None and saved_bytes(two[0], 1) == saved_bytes(forward, 1) - 2 * BYTES
    for got, known in zip(run(*two, *inputs), run(forward, backward, *inputs), strict=True):
        assert torch.equal(got, known)
    assert rematerialize_saved(forward, backward, 1, 2 * BYTES + 1) is None, (
        "what is left is a matrix product's, or of one"
    )


def test_what_reads_an_input_that_the_step_writes_to_stays_saved(cut):
    forward, backward, _ = cut
    assert rematerialize_saved(forward, backward, 1, BYTES, {"weight"}) is not None
    assert rematerialize_saved(forward, backward, 1, BYTES + 1, {"weight"}) is None


def test_what_the_caller_gets_is_no_gain(cut):
    forward, backward, _ = cut
    results = list(forward.graph.output_node().args[0])
    forward.graph.output_node().args = ((results[2], *results),)  # the product is an output, too
    forward.recompile()
    found = rematerialize_saved(forward, backward, 1, BYTES)
    assert found is not None, "another one is taken"
    assert "mul_tensor" in [node.name for node in found[0].graph.output_node().args[0][1:]]


def test_what_is_drawn_stays_saved():
    prims, x = torch.ops.prims, torch.randn(SIZE, SIZE)

    def ahead(call, x):
        seeds = call(prims.inductor_seeds.default, torch.zeros(1, dtype=torch.int64), 1, torch.device("cpu"))
        seed = call(prims.inductor_lookup_seed.default, seeds.meta["val"][0], seeds, 0)
        drawn = call(prims.inductor_random.default, torch.rand(SIZE, SIZE), [SIZE, SIZE], seed, "rand")
        return [x, seeds, call(aten.mul.Tensor, torch.rand(SIZE, SIZE), drawn, x)]

    graph = torch.fx.Graph()

    def call(target, value, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    given = graph.placeholder("x")
    given.meta["val"] = x
    graph.output(tuple(ahead(call, given)))
    forward = torch.fx.GraphModule({}, graph)
    names = [node.name for node in forward.graph.output_node().args[0]]
    values = {name: x.clone() for name in names}
    backward = graph_of(values, lambda call, *saved: [call(aten.neg.default, value) for value in saved])
    assert rematerialize_saved(forward, backward, 0, 1) is None


class Gated(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@needs_compiler
def test_a_cut_that_is_a_little_too_much_saves_less(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Gated() for _ in range(6))), torch.randn(4096, 128)
    settled, plain = [], engine.Training._attempt

    def noted(self, **options):
        made = plain(self, **options)
        settled.append(made.route)
        return made

    monkeypatch.setattr(engine.Training, "_attempt", noted)

    def step(budget):
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        run = memopt.compile(model, budget, backend="inductor")
        run(x).square().mean().backward()
        return run.report, [parameter.grad.clone() for parameter in model.parameters()]

    ample, expected = step("4GB")
    assert [item.correction for item in settled] == [0]
    settled.clear()
    budget = ample.peak_bytes - 100_000
    report, found = step(budget)
    assert report.peak_bytes <= budget
    last = settled[-1]
    assert not last.planned and not last.lowering and last.correction < 0 and "saves" in last.described
    for got, known in zip(found, expected, strict=True):
        torch.testing.assert_close(got, known)
