"""FoldActivation on CUDA: the rules on fake tensors here, the operators on a device."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.passes.fold_activation import FoldActivation
from tests.passes.convolutions import LAST, Bottleneck, conv, images
from tests.support import Apply, apply, capture, run, targets


def on_fake_cuda(model, *args):
    """The program with its inputs' metadata moved to CUDA, as when planning for a device that is not there."""
    program = capture(model, *args).copy()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in program.placeholders:
            value = node.meta["val"]
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    for node in program.calls:
        del node.meta["val"]
    return program.finish(state={})


@pytest.mark.parametrize(
    ("dtype", "activation", "nan_free", "expected"),
    [
        (torch.float16, nn.GELU("tanh"), False, True),
        (torch.bfloat16, nn.GELU("tanh"), False, True),
        (torch.float32, nn.GELU("tanh"), False, "the engine's operator for addmm and gelu_tanh is not for"),
        (torch.float16, nn.GELU(), False, "the cuda engine has no operator that computes addmm and gelu at once"),
        (torch.float16, nn.ReLU(), False, "the engine's operator for addmm and relu may turn NaN"),
        (torch.float16, nn.ReLU(), True, True),
        (torch.float64, nn.ReLU(), True, "the engine's operator for addmm and relu is not for torch.float64"),
    ],
)
def test_linear_on_cuda(dtype, activation, nan_free, expected):
    program = on_fake_cuda(nn.Sequential(nn.Linear(8, 8), activation).to(dtype), torch.randn(3, 8).to(dtype))
    result = FoldActivation(nan_free=nan_free).run(program)
    if expected is True:
        assert targets(result.program) == ["aten.t.default", "aten._addmm_activation.default"]
        result.program.check()
    else:
        assert result.refusals[0].reason.startswith(expected)


@pytest.fixture
def cudnn(monkeypatch):
    """A build of torch that has cuDNN, as far as metadata goes: convolutions keep their input's layout."""

    def layout(data, weight, backend):
        return torch._prims_common.suggest_memory_format(data)

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", layout)
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def convolution_on_cuda(model, x, nan_free=True):
    return FoldActivation(nan_free=nan_free).run(on_fake_cuda(model, x))


def test_convolution_on_cuda(cudnn):
    x = images().half()
    result = convolution_on_cuda(conv(nn.ReLU()).half(), x)
    assert targets(result.program) == ["aten.cudnn_convolution_relu.default"]
    result.program.check()
    assert result.program.output_nodes[0].meta["val"].stride() == x.stride()
    (refusal,) = convolution_on_cuda(conv(nn.ReLU()).half(), x, nan_free=False).refusals
    assert "may turn NaN into a number" in refusal.reason


def test_bottleneck_on_cuda(cudnn):
    result = convolution_on_cuda(Bottleneck().to(memory_format=LAST), images())
    assert targets(result.program) == [
        "aten.cudnn_convolution_relu.default",
        "aten.cudnn_convolution_relu.default",
        "aten.cudnn_convolution_add_relu.default",
    ]
    result.program.check()
    assert result.changes[-1].before == ("convolution_2", "add", "relu_2")


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (conv(nn.ReLU(), groups=8), images(), "cuDNN's fused operator is several times slower on grouped convolutions"),
        (nn.Sequential(nn.ConvTranspose2d(8, 8, 3), nn.ReLU()), images(), "the engine has no such operator for tr"),
        (nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU()), torch.randn(2, 8, 9), "the fused operator is for two dim"),
        (nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), images().contiguous(), "its result is not channels-last"),
        (conv(nn.SiLU()), images(), "the cuda engine has no operator that computes convolution and silu"),
    ],
)
def test_refused_on_cuda(model, x, reason, cudnn):
    (refusal,) = convolution_on_cuda(model, x).refusals
    assert refusal.reason.startswith(reason)


def test_refused_without_cudnn():
    program = on_fake_cuda(conv(nn.ReLU()), images())
    if not torch.backends.cudnn.is_available():
        assert FoldActivation(nan_free=True).run(program).refusals[0].reason == "this build of torch has no cuDNN"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda c, x: (c.bias[:, None, None] + c(x)).relu(), "unsqueeze_1 has another shape, dtype or device"),
        (lambda c, x: ((y := c(x)) + torch.tanh(x)).relu() + y.sum() * 0, "tanh, which is added to convolution, is"),
        (lambda c, x: (x.contiguous() + c(x)).relu(), "clone is laid out otherwise than convolution"),
    ],
)
def test_addends_that_do_not_fit(function, reason, cudnn):
    model = Apply(None, layer=nn.Conv2d(8, 8, 3, padding=1)).to(memory_format=LAST)
    model.function = lambda x: function(model.layer, x)
    found = convolution_on_cuda(model, images()).refusals
    assert any(reason in refusal.reason for refusal in found), found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_device(dtype):
    model = nn.ModuleList([Bottleneck(), nn.Linear(8, 16), nn.GELU("tanh")]).to("cuda", dtype, memory_format=LAST)
    x = images().to("cuda", dtype)

    def function(x):
        return model[2](model[1](model[0](x).mean((2, 3))))

    program = capture(Apply(function, parts=model), x)
    FakeTensorMode.cache_clear()  # torch.export leaves layouts there that hold without cuDNN only
    program = program.copy().finish()
    result = apply(FoldActivation(nan_free=True), program)
    found = targets(result.program)
    assert found[:3] == [
        "aten.cudnn_convolution_relu.default",
        "aten.cudnn_convolution_relu.default",
        "aten.cudnn_convolution_add_relu.default",
    ]
    assert ("aten._addmm_activation.default" in found) == (dtype is not torch.float32)
    values = [run(item, x)[0] for item in (program, result.program)]
    model.double()
    before, after = ((value.double() - function(x.double())).abs().max() for value in values)
    assert after <= 4 * before
