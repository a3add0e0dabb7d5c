"""Query, key and value as one product of weights that lie side by side."""

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.backends.joined_products import join_products, read_by_products
from memopt.compilation import layout
from memopt.models.bert import Encoder
from memopt.pass_manager import PassManager
from memopt.passes import INFERENCE
from memopt.program import InputKind
from memopt.step.planned import constant_bytes
from tests.support import capture, run, targets


def encoder():
    torch.manual_seed(0)
    small = {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "vocabulary": 128, "positions": 32}
    return Encoder(pooler=False, **small).eval()


NAMES = [[f"layers.{index}.{part}.weight" for part in ("query", "key", "value")] for index in range(2)]


def prepared(model, x):
    return PassManager(INFERENCE, verify=False).run(capture(model, x))[0]


def test_weights_side_by_side_are_one_product_without_a_copy():
    model, x = encoder(), torch.randint(128, (2, 16))
    apart = prepared(model, x)
    assert join_products(apart) is apart and not read_by_products(apart)
    layout.lay_out(model, [], NAMES)
    program = prepared(model, x)
    new = join_products(program)
    new.check()
    assert targets(program).count("aten.addmm.default") - targets(new).count("aten.addmm.default") == 4
    assert constant_bytes(new) - constant_bytes(program) == 2 * 3 * 32 * 4  # two vectors
    torch.testing.assert_close(run(new, x), [model(x)], rtol=1e-5, atol=1e-5)
    parts = {"query", "key", "value"}
    read = {program.input_of(name).target for name in read_by_products(program)}
    assert read == {f"layers.{i}.{part}.{kind}" for i in range(2) for part in parts for kind in ("weight", "bias")}


def test_a_result_that_the_caller_gets_keeps_its_layout():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.a(x), self.b(x)

    model, x = Heads().eval(), torch.randn(4, 8)
    layout.lay_out(model, [], [["a.weight", "b.weight"]])
    program = prepared(model, x)
    assert read_by_products(program) and join_products(program) is program


def test_parameters_are_moved_with_their_values_and_objects():
    model, x = encoder(), torch.randint(128, (2, 16))
    before, state = list(model.parameters()), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
    layout.lay_out(model, [], NAMES)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    first = model.layers[0]
    assert first.key.weight.untyped_storage()._cdata == first.query.weight.untyped_storage()._cdata
    assert not layout.movable_parameters(model) & {name for group in NAMES for name in group}
    model.train()
    model(x).square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert not torch.equal(first.query.weight, state["layers.0.query.weight"])


def test_nothing_is_moved_on_a_device_where_that_is_no_use():
    model = encoder()
    program = capture(model, torch.randint(128, (2, 16)))
    assert layout.parameters_of_products(program, layout.movable_parameters(model)) == []


@pytest.mark.gpu
def test_an_encoder_on_a_gpu_holds_its_weights_once():
    gc.collect()  # graphs of other tests
    before_it = torch.cuda.memory_allocated()
    import memopt

    torch.manual_seed(0)
    model = Encoder(layers=2, pooler=False, dropout=0.0).eval().cuda().half()
    x = torch.randint(1000, (8, 128), device="cuda")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        expected = model(x)
        compiled = memopt.compile(model, backend="inductor")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=2e-2, atol=2e-2)
        assert torch.cuda.memory_allocated() - before_it < 1.5 * weights
        program = capture(model, x)
        groups = [entry.target for entry in program.inputs if entry.kind is InputKind.PARAMETER]
        assert "layers.0.query.weight" in groups
        for parameter in model.layers[0].query.parameters():
            parameter.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="Inductor needs a C++ compiler")
def test_weights_are_moved_when_nothing_else_holds_them(monkeypatch):
    model, x, held = encoder(), torch.randint(128, (2, 16)), []

    def moved(model, names, groups):
        parameters = dict(model.named_parameters())
        for name in (name for group in groups for name in group):
            storage = parameters[name].untyped_storage()
            held.append(torch._C._storage_Use_Count(storage._cdata))
        layout.lay_out(model, names, groups)

    monkeypatch.setattr("memopt.calls.planned.lay_out", moved)
    monkeypatch.setattr(
        "memopt.compilation.layout.parameters_of_products",
        lambda program, movable: NAMES if frozenset(movable).issuperset(NAMES[0]) else [],
    )
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(memopt.compile(model, backend="inductor")(x), expected)
    assert held == [2] * 6  # its parameter, and who asks: another one would keep the place it had
