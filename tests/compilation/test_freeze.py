"""Batch norms folded into a model's own weights, by consent."""

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.compilation.freeze import fold_in_place
from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.program import InputKind
from tests.support import capture


def seasoned(model, *shape, dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(*shape)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(20):
            model.train()(x)
    return model.eval().to(dtype), x.to(dtype)


def layers(bias=True, affine=True):
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8, affine=affine), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_the_model_computes_the_same_from_other_numbers_and_is_folded_once(bias, affine, dtype):
    model, x = seasoned(layers(bias, affine), 4, 3, 8, 8, dtype=dtype)
    wide = copy.deepcopy(model).double()
    keys, shapes = list(model.state_dict()), [value.shape for value in model.state_dict().values()]
    with torch.no_grad():
        expected = wide(x.double())
        assert len(fold_in_place(capture(model, x))) == 1
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(model(x).double(), expected, rtol=tolerance, atol=2 * tolerance)
        again = {key: value.clone() for key, value in model.state_dict().items()}
        assert fold_in_place(capture(model, x)) == []
    assert list(model.state_dict()) == keys and [v.shape for v in model.state_dict().values()] == shapes
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


def test_a_folded_weight_stays_the_model_s_own_and_only_a_vector_is_added():
    model, x = seasoned(layers(), 4, 3, 8, 8)
    with torch.no_grad():
        fold_in_place(capture(model, x))
    program = FuseConvBn().run(capture(model, x)).program
    constants = [program.state[entry.name] for entry in program.inputs if entry.kind is InputKind.CONSTANT]
    assert [tuple(value.shape) for value in constants] == [(8,)]
    assert not any(program.input_of(name).target == "0.weight" for name in program.baked)
    found = program.run(*[program.state.get(e.name, x) for e in program.inputs if e.kind is not InputKind.CONSTANT])
    torch.testing.assert_close(found[0], model(x))


def test_what_fuse_conv_bn_refuses_is_not_folded():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.b(self.layer(self.a(self.layer(x))))

    model, x = seasoned(Shared(), 4, 3, 8, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert fold_in_place(capture(model, x)) == []
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var", "memory", "all"])
def test_what_two_batch_norms_share_is_left_as_it_is(name):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.d = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.a, self.b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.b(self.d(self.a(self.c(x))))

    model, x = seasoned(Shared(), 4, 3, 8, 8)
    if name == "all":
        model.b = model.a
    elif name == "memory":
        model.b.weight = nn.Parameter(model.a.weight.detach())
    else:
        setattr(model.b, name, getattr(model.a, name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert fold_in_place(capture(model, x)) == []
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", "static"])
def test_only_with_consent(backend):
    model, x = seasoned(layers(), 4, 3, 8, 8)
    before = model[0].weight.clone()
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
        torch._dynamo.reset()
        torch.testing.assert_close(memopt.compile(model, backend=backend)(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(model[0].weight, before)
        torch._dynamo.reset()
        compiled = memopt.compile(model, backend=backend, allow=("freeze",))
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(model[0].weight, before)
        assert any("frozen" in note for note in compiled.report.notes)
        half = compiled(x[:2])
        torch.testing.assert_close(half, expected[:2], rtol=1e-4, atol=1e-5)


def test_planning_alone_changes_nothing():
    model, x = seasoned(layers(), 4, 3, 8, 8)
    before = model[0].weight.clone()
    with torch.no_grad():
        memopt.compile(model, backend="aten", allow=("freeze",), example_inputs=(x,))
    assert torch.equal(model[0].weight, before)
