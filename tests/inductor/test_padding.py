"""Where padding lies in the place of what it pads."""

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from memopt.inductor import inference
from memopt.inductor.padding import padded_in_place, product_settings
from memopt.inductor.peak_estimate import expected_bytes
from memopt.inductor.peak_lower_bound import peak_lower_bound
from tests.inductor.test_peak_lower_bound import graph_of

aten = torch.ops.aten
WIDTH, PADDED = 2042, 2048


def padded(added=(0, PADDED - WIDTH, 0, 0), width=WIDTH, device="cuda", build=None):
    """A graph that multiplies a product's negative, padded; and its node of the padding."""
    rest = added[0] + width + added[1]
    with FakeTensorMode():
        sizes = {"x": (100, 50), "first": (50, width), "weight": (width, 10), "second": (rest, 10)}
        inputs = {name: torch.empty(size, device=device, dtype=torch.bfloat16) for name, size in sizes.items()}

        def forward(call, x, first, weight, second):
            made = call(aten.neg.default, call(aten.mm.default, x, first))
            if build is not None:
                return build(call, made, weight, second)
            wide = call(aten.constant_pad_nd.default, made, list(added), 0.0)
            return call(aten.mm.default, wide, second), call(aten.mm.default, made, weight), weight

        made = graph_of(inputs, forward)
    (pad,) = made.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    return made, pad


def test_columns_of_a_product_s_operand_are_added_in_place():
    made, pad = padded()
    assert padded_in_place(pad) is pad.args[0]
    with FakeTensorMode():
        nothing = graph_of({"weight": torch.empty(1)}, lambda call, w: [w])
    taken = 2 * 100 * (WIDTH + 2 * 10)  # the matrix, and both results
    assert expected_bytes(made, nothing, 2) == taken
    assert peak_lower_bound(made, nothing, 2) == int(0.97 * taken)


@pytest.mark.parametrize(
    "options",
    [
        {"added": (1, 5, 0, 0)}, {"added": (0, 6, 1, 0)}, {"added": (0, 7, 0, 0)}, {"added": (0, -2, 0, 0)},
        {"width": 1018}, {"device": "cpu"},
    ],
    ids=["left", "rows", "beyond the room", "cut off", "short rows", "cpu"],
)  # fmt: skip
def test_elsewhere_it_takes_memory_of_its_own(options):
    assert padded_in_place(padded(**options)[1]) is None


def test_what_something_else_reads_is_padded_in_a_place_of_its_own():
    def build(call, made, weight, second):
        pad = call(aten.constant_pad_nd.default, made, [0, PADDED - WIDTH, 0, 0], 0.0)
        return call(aten.mm.default, pad, second), call(aten.neg.default, pad)

    assert padded_in_place(padded(build=build)[1]) is None


def test_what_a_library_has_computed_is_copied():
    def build(call, made, weight, second):
        product = made.all_input_nodes[0]
        pad = call(aten.constant_pad_nd.default, product, [0, PADDED - WIDTH, 0, 0], 0.0)
        return call(aten.mm.default, pad, second), made

    assert padded_in_place(padded(build=build)[1]) is None


def test_other_nodes_pad_nothing():
    made, pad = padded()
    assert all(padded_in_place(node) is None for node in made.graph.nodes if node is not pad)


@pytest.mark.parametrize("setting", ["inplace_padding", "comprehensive_padding"])
def test_where_inductor_is_told_not_to_it_does_not(setting):
    with config.patch(setting, False):
        assert padded_in_place(padded()[1]) is None


@pytest.mark.gpu
def test_on_a_gpu_code_of_a_padded_loss_takes_what_is_expected(monkeypatch):
    import memopt
    from memopt.inductor import min_cut_partition

    found = []
    for name in ("peak_lower_bound", "expected_bytes"):
        plain = getattr(min_cut_partition, name)
        monkeypatch.setattr(min_cut_partition, name, lambda *args, plain=plain: found.append(plain(*args)) or found[-1])
    torch._dynamo.reset()
    model = memopt.models.build("bert_large", layers=1, width=1024, heads=16).to("cuda", torch.bfloat16)
    run = memopt.compile(model, "100%", backend="inductor")
    run(**model.example_inputs(8, labels=True)).backward()
    (session,) = run._memopt.sessions.values()
    (peaks,) = session._emitted.values()
    assert not session.step.lowering
    real = max(peaks.forward, peaks.backward)
    expected, least = found[:2]
    assert least <= real <= 1.06 * expected


def returned(*shapes, dtype=torch.bfloat16):
    graph = fx.Graph()
    nodes = [graph.call_function(torch.ones, (shape,)) for shape in shapes]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["example_value"] = torch.empty(shape, dtype=dtype)
    graph.output((*nodes, None))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("shapes", "dtype", "pads"),
    [
        ([(), (3, 50264)], torch.bfloat16, True),
        ([(), (2, 3, 50257)], torch.bfloat16, False),
        ([(50257,)], torch.bfloat16, True),  # it has no rows
        ([(3, 12)], torch.bfloat16, False),
        ([(3, 12)], torch.float32, True),
    ],
)
def test_products_are_padded_where_rows_that_are_returned_are_aligned(shapes, dtype, pads):
    for saved_of in ([torch.ones(2)], []):
        found = product_settings(returned(*shapes, dtype=dtype), saved_of)
        assert found == ({} if pads else {"shape_padding": False})


def test_in_training_no_product_is_padded_where_sizes_are_symbols():
    size = ShapeEnv().create_unbacked_symint()
    graph = returned((3, 16))
    assert product_settings(graph, [size, torch.ones(2)]) == {"shape_padding": False}
    assert product_settings(graph) == {}


@pytest.mark.parametrize(("columns", "said"), [(12, {"shape_padding": False}), (16, {})])
def test_code_without_gradients_is_made_by_these_settings(columns, said, monkeypatch):
    patches = []
    monkeypatch.setattr(inference, "compile_graph", lambda *args: patches.append(args[-1]))
    graph = returned((3, columns))
    for node in graph.graph.nodes:
        node.meta["val"] = node.meta.get("example_value")
    inference._lowered(graph)
    assert {key: value for key, value in patches[0].items() if key == "shape_padding"} == said


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, None])
def test_on_a_gpu_logits_of_an_odd_vocabulary_lie_as_the_model_s(dynamic):
    import memopt

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = torch.nn.Embedding(5025, 512), torch.nn.Linear(512, 50257, bias=False)

        def forward(self, ids):
            logits = self.head(self.words(ids).tanh())
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Head().to("cuda", torch.bfloat16)
    run = memopt.compile(model, backend="inductor", dynamic=dynamic)
    for rows, length in ((15, 426), (14, 462), (9, 311)):
        ids = torch.randint(5025, (rows, length), device="cuda")
        with torch.no_grad():  # the loss reads the logits, too, so that they are not computed by a call of their own
            assert run(ids)[0].is_contiguous()
        logits, loss = run(ids)
        assert logits.is_contiguous()
        loss.backward()
        torch.testing.assert_close(loss, model(ids)[1], rtol=2e-2, atol=2e-2)
    assert not any("memopt failed" in note for note in run.report.notes)
