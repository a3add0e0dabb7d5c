"""FuseNorm: every spelling of LayerNorm and RMSNorm, its numbers against float64, and every refusal with its reason."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
import memopt.passes.fuse_norm as fuse_norm
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.fuse_norm import FuseNorm
from memopt.passes.merge_common import MergeCommon
from tests.passes.build import capture_joint
from tests.support import Apply, apply, capture, run
from tests.support import targets as all_targets

FUSED = "aten.native_layer_norm.default"
N = 24


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def tensors(dtype=torch.float32):
    return normal(3, 5, N, dtype=dtype), normal(N, seed=1, dtype=dtype), normal(N, seed=2, dtype=dtype)


def targets(program):
    """The operators, without what torch.export adds to a cast."""
    return [name for name in all_targets(program) if "_assert_tensor_metadata" not in name]


def tidied(function, *args):
    return MergeCommon().run(EliminateCopies().run(capture(Apply(function), *args)).program).program


def fused(function, *args, factor=4.0):
    """The result of the pass; layouts must stay, and the float64 error within `factor` times the one by hand."""
    program = tidied(function, *args)
    result = apply(FuseNorm(), program)
    (before,), (after,) = run(program, *args), run(result.program, *args)
    exact = function(*(arg.double() for arg in args))
    assert (before.dtype, before.shape, before.stride()) == (after.dtype, after.shape, after.stride())
    floor = 8 * torch.finfo(before.dtype).eps * float(exact.abs().max())
    error, by_hand = (float((value.double() - exact).abs().max()) for value in (after, before))
    assert error <= factor * by_hand + floor
    return result


def refusals(function, *args):
    program = tidied(function, *args)
    result = apply(FuseNorm(), program)
    assert result.program is program
    return [refusal.reason for refusal in result.refusals]


def textbook(x, w, b, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    var = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x - mean) / torch.sqrt(var + eps)) + b


def by_rsqrt(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return b + centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-6) * w


def by_var(x, w, b):
    var = x.var(-1, keepdim=True, unbiased=False)
    return (x - x.mean(-1, keepdim=True)) / (var + 1e-12).sqrt() * w + b


def by_power(x, w, b):
    var = x.var(-1, correction=0)
    return (x - x.mean(-1)[..., None]) * (var + 1e-5).pow(-0.5).unsqueeze(-1) * w + b


def by_reciprocal(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (1 / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)) * w + b


@pytest.mark.quick("dtype0-*", "dtype1-by_var", "*-textbook")
@pytest.mark.parametrize("function", [textbook, by_rsqrt, by_var, by_power, by_reciprocal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_spelling_becomes_one_operator(function, dtype):
    result = fused(function, *tensors(dtype))
    assert targets(result.program) == [FUSED]
    assert result.refusals == ()
    assert apply(FuseNorm(), result.program).program is result.program


def test_what_the_operator_is_given():
    (node, _) = fused(textbook, *tensors()).program.calls
    assert [str(arg) for arg in node.args] == ["args_0", f"[{N}]", "args_1", "args_2", "1e-05"]


def test_the_change_names_what_became_one():
    (change,) = fused(textbook, *tensors()).changes
    assert change.summary == "add_1 spells out LayerNorm"
    assert set(change.before) == {"mean", "sub", "pow_1", "mean_1", "add", "sqrt", "div", "mul", "add_1"}
    assert change.after == ("layer_norm",)


def plain(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("function", "args", "rest"),
    [
        (lambda x, w: plain(x), 0, []),
        (lambda x, w: plain(x) * w, 1, []),
        (lambda x, w: plain(x) + w, 1, []),
        (lambda x, w: plain(x) * w[None, None], 1, ["aten.unsqueeze.default", "aten.view.default"]),
        (lambda x, w: plain(x) - w, 0, ["aten.sub.Tensor"]),
        (lambda x, w: plain(x) * 2, 0, ["aten.mul.Tensor"]),
        (lambda x, w: torch.add(plain(x), w, alpha=2), 0, ["aten.add.Tensor"]),
        (lambda x, w: plain(x) * w[:1], 0, ["aten.mul.Tensor", "aten.slice.Tensor"]),
    ],
)
def test_with_and_without_weight_and_bias(function, args, rest):
    result = fused(function, normal(3, 5, N), normal(N, seed=1))
    (node,) = [node for node in result.program.calls if str(node.target) == FUSED]
    assert sum(isinstance(arg, torch.fx.Node) for arg in node.args[2:4]) == args
    found = targets(result.program)
    found.remove(FUSED)
    assert sorted(set(found) - {"aten.unsqueeze.default"}) == sorted(set(rest) - {"aten.unsqueeze.default"})


def test_several_trailing_dimensions():
    def function(x, w):
        centred = x - x.mean((-2, -1), keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean((1, 2), keepdim=True) + 1e-5) * w

    assert targets(fused(function, normal(4, 3, N), normal(3, N, seed=1)).program) == [FUSED]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_in_float32(dtype):
    def function(x, w, b):
        wide = x.float() if x.dtype == dtype else x
        return w * plain(wide).to(x.dtype) + b

    assert targets(fused(function, *tensors(dtype)).program) == [FUSED]

    def stays_wide(x, w, b):
        return plain(x.float() if x.dtype == dtype else x)

    assert targets(fused(stays_wide, *tensors(dtype)).program) == ["aten._to_copy.default", FUSED]


def test_a_transposed_operand_keeps_its_layout_where_it_is_seen():
    x = normal(3, N, 5)
    assert refusals(lambda x: plain(x.transpose(1, 2)), x) == [
        "a norm by hand, but the fused operator would lay its result out otherwise"
    ]
    result = fused(lambda x: plain(x.transpose(1, 2)).flatten().contiguous(), x)
    assert FUSED in targets(result.program)


def test_a_hugging_face_model_with_norms_by_hand():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = hf.DebertaModel(hf.DebertaConfig(vocab_size=64, max_position_embeddings=32, **sizes)).eval()
    inputs = {"input_ids": torch.randint(2, 64, (2, 20))}
    compiled = memopt.compile(model, backend="aten")
    with torch.no_grad():
        found, expected = compiled(**inputs)[0], model(**inputs)[0]
        exact = model.double()(**inputs)[0]
    (record,) = [record for record in compiled.report.passes if record.name == "fuse_norm"]
    assert len(record.changes) == 5
    assert record.refusals == ()
    floor = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((found - exact).abs().max()) <= 2 * float((expected - exact).abs().max()) + floor


# -- refusals ------------------------------------------------------------------------------------------------------


def test_refused_over_other_dimensions():
    def function(x):
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()

    assert refusals(function, normal(3, N, 5)) == ["LayerNorm by hand, but over dimensions [1] of 3, not the last ones"]


def test_refused_for_the_unbiased_variance():
    def function(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()

    assert refusals(function, normal(3, N)) == ["LayerNorm by hand, but of the unbiased variance"]


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x: c / (x.std(-1, keepdim=True) + 1e-5),
        lambda c, x: c / (x.std(-1, keepdim=True, unbiased=False) + 1e-5),
        lambda c, x: c / (c.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5),
    ],
)
def test_refused_when_eps_is_added_to_the_deviation(function):
    assert refusals(lambda x: function(x - x.mean(-1, keepdim=True), x), normal(3, N)) == [
        "LayerNorm by hand, but eps is not added to the variance, under the root"
    ]


def test_refused_without_eps():
    def function(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / centred.pow(2).mean(-1, keepdim=True).sqrt()

    assert refusals(function, normal(3, N)) == ["LayerNorm by hand, but without a positive eps under the root"]


def test_refused_when_a_statistic_is_read_elsewhere():
    def function(x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(), mean

    assert refusals(function, normal(3, N)) == ["a norm by hand, but mean, which it is made of, is read by output too"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.sum(-1, keepdim=True).sqrt(),
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt(),
        lambda x: x * torch.rsqrt(x.mean(-1, keepdim=True) + 1e-5),
        lambda x: (x - x.mean()) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt(),
        lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5),
        lambda x: x * x,
    ],
)
def test_what_is_no_norm_is_left_alone(function):
    assert refusals(function, normal(3, N)) == []


def test_training_programs_are_returned_unchanged():
    program = capture_joint(lambda x, w, b: (textbook(x, w, b),), *(t.requires_grad_() for t in tensors()))
    assert FuseNorm().run(program).program is program


# -- RMSNorm -------------------------------------------------------------------------------------------------------


def llama(x, w):
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def t5(x, w):
    variance = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def without_weight(x, w):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("function", [llama, t5, without_weight])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(function, dtype, monkeypatch):
    x, w, _ = tensors(dtype)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CPU"):
        assert refusals(function, x, w) == ["RMSNorm by hand, but on cpu PyTorch has no fused operator for it"]
    # The operator is a function of these operations everywhere; the CPU stands for a device that has a kernel.
    monkeypatch.setattr(fuse_norm, "_has_kernel", lambda name, device: True)
    result = fused(function, x, w)
    assert targets(result.program) == ["aten._fused_rms_norm.default"]
    (node,) = [node for node in result.program.calls if "rms_norm" in str(node.target)]
    assert node.args[0].name == "args_0"


def test_rms_norm_of_a_wide_weight_stays_wide(monkeypatch):
    def gemma(x, w):
        wide = x.float() if x.dtype is torch.bfloat16 else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w.to(wide.dtype)).to(x.dtype)

    monkeypatch.setattr(fuse_norm, "_has_kernel", lambda name, device: True)
    result = fused(gemma, *tensors(torch.bfloat16)[:2])
    found = targets(result.program)
    assert found.count("aten._fused_rms_norm.default") == 1
    assert found[-1] == "aten._to_copy.default"


def test_rms_norm_on_cuda_where_torch_has_the_kernel():
    program = tidied(without_weight, *tensors()[:2]).copy()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in program.placeholders:
            node.meta["val"] = torch.empty(node.meta["val"].shape, device="cuda")
    for node in program.calls:
        del node.meta["val"]
    result = FuseNorm().run(program.finish(state={}))
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA"):
        assert targets(result.program) == ["aten._fused_rms_norm.default"]
    else:
        assert [refusal.reason for refusal in result.refusals] == [
            "RMSNorm by hand, but on cuda PyTorch has no fused operator for it"
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("function", [llama, t5, lambda x, w: textbook(x, w, w)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_device(function, dtype):
    x, w, _ = (tensor.cuda() for tensor in tensors(dtype))
    result = fused(function, x, w)
    assert len(targets(result.program)) == 1
