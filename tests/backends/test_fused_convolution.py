"""Convolutions with what follows them as one kernel: what is fused, what is refused, the numbers, and new weights."""

import copy
import gc
import operator

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.fused_convolution import FUSED, Worth, find_fusions, fuse_convolutions, read_by
from memopt.backends.inductor import missing_compiler
from memopt.inductor import inference
from memopt.inductor.inference import InductorInference
from memopt.pass_manager import PassManager
from memopt.passes.fuse_conv_bn import FuseConvBn
from memopt.program import InputKind
from tests.support import capture, run, targets

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

aten = torch.ops.aten
UNFOLDED = [item for item in memopt.INFERENCE if not isinstance(item, FuseConvBn)]


class Block(nn.Module):
    """relu(norm(conv(x)) + other), where other is x, a convolution of x, or a normed one."""

    def __init__(self, other="normed", bias=False):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8))
        side = nn.Conv2d(4, 8, 1, bias=bias)
        self.side = nn.Sequential(side, nn.BatchNorm2d(8)) if other == "normed" else side

    def forward(self, x):
        return torch.relu(self.main(x) + self.side(x))


def seasoned(model, *shape):
    """The model in half precision, channels-last, with batch norms that have seen data; and an input."""
    torch.manual_seed(0)
    x = torch.randn(*shape)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        model.train()(x)
    return model.eval().half().to(memory_format=torch.channels_last), x.half()


def error(found, model, x):
    expected = copy.deepcopy(model).double()(x.double())
    return float((found.double() - expected).abs().max() / expected.abs().max())


def prepared(model, *inputs, passes=UNFOLDED):
    return PassManager(passes, verify=False).run(capture(model, *inputs))[0]


def convolution_norm_relu(**options):
    return nn.Sequential(nn.Conv2d(4, 8, 3, **options), nn.BatchNorm2d(8), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "fused", "left"),
    [
        (convolution_norm_relu(), 1, 0),
        (convolution_norm_relu(bias=False, stride=2, padding=1, dilation=2), 1, 0),
        (convolution_norm_relu(groups=2), 1, 0),
        (nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), 1, 0),
        (Block("normed"), 1, 1),
        (Block("normed", bias=True), 1, 1),
        (Block("plain", bias=True), 1, 1),
        (Block("plain"), 1, 1),
    ],
)
def test_what_follows_a_convolution_is_one_kernel_with_it(model, fused, left):
    model, x = seasoned(model, 3, 4, 9, 9)
    with torch.no_grad():
        program = prepared(model, x)
        new = fuse_convolutions(program)
        new.check()
        names = targets(new)
        assert names.count("memopt.convolution_relu.default") == fused
        assert names.count("aten.convolution.default") == left
        assert "aten._native_batch_norm_legit_no_training.default" not in names
        assert error(run(new, x)[0], model, x) <= 1.5 * error(model(x), model, x) + 1e-3


def test_a_shift_that_is_added_beside_moves_into_the_kernel():
    model, x = seasoned(Block("normed", bias=True), 3, 4, 9, 9)
    with torch.no_grad():
        new = fuse_convolutions(prepared(model, x))
    (side,) = [node for node in new.calls if node.target is aten.convolution.default]
    assert side.args[2] is None
    (fused,) = [node for node in new.calls if node.target is FUSED]
    assert fused.args[2].name in {entry.name for entry in new.inputs if entry.kind is InputKind.CONSTANT}


def test_whole_models():
    for name in ("resnet50", "densenet121", "unet"):
        model = memopt.models.build(name, tiny=True)
        x = next(iter(model.example_inputs(2).values()))
        model, x = seasoned(model, *x.shape)
        with torch.no_grad():
            program = prepared(model, x)
            new = fuse_convolutions(program)
            new.check()
            assert targets(new).count("memopt.convolution_relu.default") == len(find_fusions(program)) >= 5
            assert error(run(new, x)[0], model, x) <= 1.5 * error(model(x), model, x) + 1e-3


def test_weights_stay_as_they_are_and_only_vectors_are_kept():
    model, x = seasoned(convolution_norm_relu(), 3, 4, 9, 9)
    program = prepared(model, x)
    new = fuse_convolutions(program)
    made = [new.state[entry.name] for entry in new.inputs if entry.kind is InputKind.CONSTANT]
    assert made and all(value.numel() == 8 for value in made)
    read = {program.input_of(name).target for name in read_by(program)}
    assert read == {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}


class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 8, 3)

    def forward(self, x):
        y = self.layer(x)
        return torch.relu(y), y


@pytest.mark.parametrize(
    "model",
    [TwoReaders(), nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU())],
)
def test_what_is_no_such_place_is_left_alone(model):
    model, x = seasoned(model, 3, 4, 9, 9)
    program = prepared(model, x)
    assert not find_fusions(program) and fuse_convolutions(program) is program


def test_only_half_precision_is_fused():
    model, x = seasoned(convolution_norm_relu(), 3, 4, 9, 9)
    assert not find_fusions(prepared(model.float(), x.float()))


def test_a_batch_norm_whose_values_are_not_known_stays():
    model, x = seasoned(convolution_norm_relu(), 3, 4, 9, 9)
    program = prepared(model, x)
    (mean,) = [entry.name for entry in program.inputs if entry.target == "1.running_mean"]
    program.state.pop(mean)
    assert fuse_convolutions(program) is program


def test_a_batch_norm_elsewhere_is_a_product_and_a_sum():
    model, x = seasoned(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3)), 3, 4, 9, 9)
    with torch.no_grad():
        program = prepared(model, x)
        new = fuse_convolutions(program)
        new.check()
        assert "aten._native_batch_norm_legit_no_training.default" not in targets(new)
        assert not any(node.target is operator.getitem for node in new.calls)
        assert error(run(new, x)[0], model, x) <= 1.5 * error(model(x), model, x) + 1e-3


def test_what_does_not_pay_is_not_fused_and_is_timed_once():
    model, x = seasoned(nn.Sequential(convolution_norm_relu(padding=1), nn.Conv2d(8, 4, 1), nn.ReLU()), 3, 4, 9, 9)
    program = prepared(model, x)
    asked = []
    new = fuse_convolutions(program, lambda program, fusion: asked.append(fusion) or False)
    assert len(asked) == 2 and not any(node.target is FUSED for node in new.calls)
    worth = Worth()
    state = torch.random.get_rng_state()
    found = [worth(program, fusion) for fusion in (*asked, *asked)]
    assert found[:2] == found[2:] and set(found) <= {True, False} and len(worth._known) == 2
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("added", [False, True])
def test_the_operator_lays_its_result_out_as_promised(added):
    x, weight = torch.randn(2, 4, 9, 9).half(), torch.randn(8, 4, 3, 3).half()
    other = torch.randn(2, 8, 4, 5).half() if added else None
    arguments = (x, weight, None, other, [2, 2], [0, 1], [1, 1], 1)
    torch.library.opcheck(FUSED, arguments, test_utils=("test_schema", "test_faketensor"))
    found = FUSED(*arguments)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = torch.conv2d(x.float(), weight.float(), stride=2, padding=(0, 1)) + (other.float() if added else 0)
    torch.testing.assert_close(found.float(), expected.relu(), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="Inductor needs a compiler")
def test_code_serves_again_when_a_batch_norm_has_changed(monkeypatch):
    monkeypatch.setattr(inference, "_for_device", fuse_convolutions)
    model, x = seasoned(nn.Sequential(convolution_norm_relu(padding=1), nn.Conv2d(8, 4, 1)), 3, 4, 9, 9)
    engine = InductorInference()
    with torch.no_grad():
        program = prepared(model, x)
        arguments = [program.state.get(entry.name, x) for entry in program.inputs]
        function = engine.bind(program)
        torch.testing.assert_close(function(list(arguments))[0], model(x), rtol=1e-2, atol=1e-2)
        model[0][1].bias.add_(1)
        again = engine.bind(program)
        assert again is function
        torch.testing.assert_close(again(list(arguments))[0], model(x), rtol=1e-2, atol=1e-2)
        other = engine.bind(prepared(model, x[:1]))
        assert other is not function


@pytest.mark.gpu
@pytest.mark.parametrize("freeze", [False, True])
def test_a_residual_network_on_a_gpu(freeze):
    gc.collect()  # graphs of other tests
    before_it = torch.cuda.memory_allocated()
    model, x = seasoned(memopt.models.build("resnet18"), 8, 3, 64, 64)
    model, x = model.cuda(), x.cuda()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        before, expected = error(model(x), model, x), copy.deepcopy(model).double()(x.double())
        compiled = memopt.compile(model, backend="inductor", allow=("freeze",) if freeze else ())
        for _ in range(3):
            found = compiled(x).double()
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1.5 * before + 2e-3
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before_it < 1.9 * weights
