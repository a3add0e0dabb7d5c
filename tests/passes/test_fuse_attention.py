"""FuseAttention: every spelling, its numbers against float64, masks, and every refusal with its reason."""

import math

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.passes.eliminate_dead import EliminateDead
from memopt.passes.fold_constants import FoldConstants
from memopt.passes.fuse_attention import FuseAttention
from memopt.passes.merge_common import MergeCommon
from tests.passes.attention import (
    FUSED,
    INF,
    B,
    D,
    H,
    L,
    fused,
    heads,
    masked,
    names,
    normal,
    operator,
    padding,
    refusals,
    scaled,
)
from tests.passes.build import capture_joint
from tests.support import apply, run

# -- spellings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        scaled,
        lambda q, k, v: (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v,
        lambda q, k, v: ((q * D**-0.5) @ k.transpose(-2, -1)).softmax(3) @ v,
        lambda q, k, v: (q @ (k / math.sqrt(D)).transpose(-2, -1)).softmax(-1) @ v,
        lambda q, k, v: ((q / D**0.25) @ (k.transpose(-2, -1) / D**0.25)).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT / torch.sqrt(torch.tensor(float(D)))).softmax(-1) @ v,
        lambda q, k, v: nn.functional.dropout((q @ k.mT / 3).softmax(-1), 0.5, training=False) @ v,
        lambda q, k, v: nn.functional.dropout((q @ k.mT).div(3).softmax(-1), 0.0, training=True) @ v,
        lambda q, k, v: torch.matmul((q @ k.permute(0, 1, 3, 2) / 3).softmax(-1), v),
        lambda q, k, v: torch.bmm(
            torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).div(3).softmax(-1), v.flatten(0, 1)
        ).view(v.shape),
        lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) / 3).softmax(-1), v),
    ],
)
def test_every_spelling_becomes_one_operator(function):
    result = fused(function, *heads())
    assert names(result).count(FUSED) == 1
    assert not any("softmax" in name or "bmm" in name for name in names(result))
    assert result.refusals == ()
    assert apply(FuseAttention(), result.program).program is result.program


def test_scale_and_operands_are_read_off():
    result = fused(lambda q, k, v: ((q * 0.5) @ (k.mT / 4) * 3).softmax(-1) @ v, *heads())
    assert operator(result).kwargs == {"scale": 0.375}
    assert [node.name for node in operator(result).args] == ["args_0", "args_1", "args_2"]
    assert names(result) == [FUSED]
    (change,) = result.changes
    assert change.summary == "_softmax and its two products are one scaled_dot_product_flash_attention_for_cpu"
    assert {"bmm", "_softmax", "bmm_1"} <= set(change.before)
    assert change.after == ("attention",)


def test_copies_of_heads_and_of_the_result_go():
    def function(x):
        q, k, v = (part.view(B, L, H, D).transpose(1, 2) for part in x.chunk(3, -1))
        return scaled(q, k, v).transpose(1, 2).reshape(B, L, H * D)

    result = fused(function, normal(B, L, 3 * H * D))
    assert "aten.clone.default" not in names(result)
    assert names(result)[-1] == "aten._unsafe_view.default"


def test_einsum_over_transposed_heads():
    def function(q, k, v):
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 3).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v).contiguous().relu()

    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in heads())
    assert "aten.clone.default" not in names(fused(function, q, k, v))


@pytest.mark.parametrize("shape", [(L, D), (3, L, D), (2, 3, H, L, D)])
def test_any_number_of_leading_dimensions(shape):
    tensors = [normal(*shape, seed=i) for i in range(3)]
    assert FUSED in names(fused(scaled, *tensors))


@pytest.mark.parametrize(("queries", "keys"), [(1, 40), (40, 17), (3, 600)])
def test_other_numbers_of_queries_than_keys(queries, keys):
    assert FUSED in names(fused(scaled, *heads(queries=queries, keys=keys)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upcast", ["none", "softmax", "scores", "operands"])
def test_half_precision_with_and_without_float32(dtype, upcast):
    def function(q, k, v):
        if upcast == "operands":
            q, k = q.float(), k.float()
        scores = q @ k.mT / math.sqrt(D)
        if upcast == "scores":
            scores = scores.float()
        kind = torch.float32 if upcast == "softmax" and q.dtype == dtype else None
        return torch.softmax(scores, -1, dtype=kind).to(v.dtype) @ v

    found = names(fused(function, *heads(dtype)))
    assert FUSED in found
    assert "aten._softmax.default" not in found


@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize(("keys", "width"), [(16, 4), (197, 16), (512, 64)])
def test_rounding_is_within_the_tolerance(keys, width, spread):
    q, k, v = (normal(2, 2, keys, width, seed=i) * (spread if i < 2 else 1) for i in range(3))
    fused(scaled, q, k, v, factor=2.0)


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("how", ["expand", "repeat_interleave"])
def test_repeated_heads_are_read_unrepeated(few, how):
    def repeat(x):
        if how == "repeat_interleave":
            return x.repeat_interleave(H // few, 1)
        return x[:, :, None].expand(B, few, H // few, L, D).reshape(B, H, L, D)

    tensors = [normal(B, H, L, D), normal(B, few, L, D, seed=1), normal(B, few, L, D, seed=2)]
    result = fused(lambda q, k, v: scaled(q, repeat(k), repeat(v)), *tensors)
    assert [node.name for node in operator(result).args[:3]] == ["args_0", "args_1", "args_2"]
    only_keys = fused(lambda q, k, v: scaled(q, repeat(k), v), *tensors[:2], normal(B, H, L, D, seed=2))
    assert operator(only_keys).args[1].name != "args_1"


def test_nan_stays_nan():
    result = fused(scaled, *heads())
    for index in range(3):
        tensors = heads()
        tensors[index][0, 0, 1] = float("nan")
        assert torch.equal(scaled(*tensors).isnan(), run(result.program, *tensors)[0].isnan())


# -- refusals --------------------------------------------------------------------------------------------------------


def test_refused_when_probabilities_or_scores_are_read_elsewhere():
    def returned(q, k, v):
        p = (q @ k.mT).softmax(-1)
        return p @ v, p

    assert refusals(returned, *heads()) == ["its probabilities are read by output too"]

    def scores(q, k, v):
        s = q @ k.mT
        return s.softmax(-1) @ v, s.amax()

    assert refusals(scores, *heads()) == ["view_2, its scores, is read by amax too"]


def test_refused_when_dropout_is_active():
    found = refusals(lambda q, k, v: nn.functional.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v, *heads())
    assert len(found) == 1
    assert found[0].startswith("dropout is active")


def test_refused_for_other_operations_in_between():
    assert refusals(lambda q, k, v: ((q @ k.mT / 50).tanh() * 50).softmax(-1) @ v, *heads()) == [
        "tanh (aten.tanh.default) lies between the first product and the softmax"
    ]
    found = refusals(lambda q, k, v, w: ((q @ k.mT).softmax(-1) * w) @ v, *heads(), normal(1, H, 1, 1))
    assert found == ["mul (aten.mul.Tensor) lies between the softmax and the second"]


def test_refused_when_a_number_does_not_hide():
    found = refusals(masked(lambda s, m: s.masked_fill(~m, -1e4)), *heads(), padding())
    assert found == ["scores are replaced by -10000, which does not hide them for certain"]


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, -1e9), (torch.float16, -65504.0)])
def test_refused_when_a_row_may_be_the_mean_of_all_values(dtype, number):
    found = refusals(masked(lambda s, m: s.masked_fill(~m, number)), *heads(dtype), padding())
    assert found == ["a row may be hidden wholly: by hand it is the mean of all values, in the fused operator 0"]


def test_refused_for_masks_that_four_dimensions_cannot_express():
    tensors = [normal(2, 3, H, L, D, seed=i) for i in range(3)]
    found = refusals(masked(lambda s, m: s + m), *tensors, normal(1, 3, 1, L, L))
    assert found == ["args_3 broadcasts to the scores in a way that the fused operator cannot"]


def test_refused_for_masks_of_other_dtypes():
    tensors = heads(torch.bfloat16)
    assert refusals(masked(lambda s, m: s + m.long()), *tensors, padding())[0].endswith("is torch.int64")


def test_refused_for_float64_and_for_few_keys():
    assert refusals(scaled, *heads(torch.float64)) == ["torch.float64 attention stays as it is written"]
    assert refusals(scaled, *heads(keys=15)) == ["the CPU's fused operator hides NaN where there are only 15 keys"]


def test_refused_without_a_fused_operator():
    q, k, _ = heads()
    assert refusals(scaled, q, k, normal(B, H, L, 2 * D)) == [
        "PyTorch has no fused operator for this device, dtype and shapes"
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert len(refusals(scaled, *heads())) == 1


def test_refused_for_a_scale_that_is_not_positive():
    assert refusals(lambda q, k, v: (q @ k.mT * -1).softmax(-1) @ v, *heads()) == [
        "its scores are multiplied by -1, which is not positive and finite"
    ]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda q, k, v: (q @ k.mT) @ v,
        lambda q, k, v: q.softmax(-1) @ k.mT,
        lambda q, k, v: (q @ k.mT).softmax(-1),
        lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1),
    ],
)
def test_what_is_no_attention_is_left_alone(function):
    assert refusals(function, *heads()) == []


def test_training_programs_are_returned_unchanged():
    program = capture_joint(lambda q, k, v: (scaled(q, k, v),), *(t.requires_grad_() for t in heads()))
    assert FuseAttention().run(program).program is program


# -- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        lambda x: x,
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: (x.transpose(1, 2).contiguous(), x.mT.contiguous()),
        lambda x: x.view(B, H * L, D).relu(),
        lambda x: x.relu(),
        lambda x: (x, x.flatten()),
        lambda x: x.transpose(1, 2)[..., None].squeeze(-1).flatten(2),
    ],
)
def test_readers_see_the_layout_that_they_saw(after):
    result = fused(lambda q, k, v: after(scaled(q, k, v)), *heads())
    assert names(result).count(FUSED) == 1


# -- models ----------------------------------------------------------------------------------------------------------


def hugging_face(name):
    hf = pytest.importorskip("transformers")
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, **eager}
    words = {"vocab_size": 64, "max_position_embeddings": 32}
    ids = torch.randint(2, 64, (2, 20))
    attention_mask = torch.ones(2, 20, dtype=torch.int64)
    attention_mask[1, 15:] = 0
    text = {"input_ids": ids, "attention_mask": attention_mask}
    image = {"pixel_values": torch.randn(2, 3, 32, 32)}
    patches = {"image_size": 32, "patch_size": 8}
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**sizes, **words)), text, 2
    if name == "gpt2":
        config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **eager)
        return hf.GPT2LMHeadModel(config), {"input_ids": ids}, 2
    if name == "t5":
        shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        config = hf.T5Config(decoder_start_token_id=0, **shape, **eager)
        return hf.T5ForConditionalGeneration(config), {**text, "decoder_input_ids": ids}, 6
    if name == "bart":
        shape = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))}
        attention = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        return hf.BartModel(hf.BartConfig(d_model=32, **shape, **attention, **words, **eager)), text, 6
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **sizes, **words)), text, 2
    if name == "mistral":
        config = hf.MistralConfig(num_key_value_heads=1, sliding_window=4, **sizes, **words)
        return hf.MistralForCausalLM(config), {"input_ids": ids}, 2
    if name == "opt":
        config = hf.OPTConfig(ffn_dim=64, word_embed_proj_dim=32, **words, **sizes)
        return hf.OPTForCausalLM(config), text, 2
    if name == "deberta":
        return hf.DebertaV2Model(hf.DebertaV2Config(**sizes, **words)), text, 2
    if name == "swin":
        config = hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
        config._attn_implementation = "eager"
        return hf.SwinModel(config), image, 2
    if name == "gemma2":  # caps its scores
        config = hf.Gemma2Config(num_key_value_heads=1, head_dim=16, **sizes, **words)
        return hf.Gemma2ForCausalLM(config), {"input_ids": ids}, 0
    return hf.ViTModel(hf.ViTConfig(**sizes, **patches)), image, 2


QUICK = ("bert", "gpt2", "t5", "llama", "deberta")
SLOW = ("vit", "mistral", "opt", "swin", "bart", "gemma2")


@pytest.mark.quick("llama", "deberta")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_hugging_face_models(name):
    torch._dynamo.reset()
    model, inputs, sites = hugging_face(name)
    model.config.use_cache = False
    passes = (EliminateCopies(), FoldConstants(), MergeCommon(), FuseAttention(), EliminateDead())
    compiled = memopt.compile(model.eval(), backend="aten", passes=passes)
    with torch.no_grad():
        found, expected = (floats(run(**inputs)) for run in (compiled, model))
        wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        exact = floats(model.double()(**wide))
    (record,) = (record for record in compiled.report.passes if record.name == "fuse_attention")
    assert len(record.changes) == sites
    assert record.evidence is None if not sites else not record.evidence.unproved
    for a, b, r in zip(found, expected, exact, strict=True):
        floor = 4 * torch.finfo(torch.float32).eps * float(r.abs().max())
        assert float((a - r).abs().max()) <= 2 * float((b - r).abs().max()) + floor


def floats(output):
    return [leaf for leaf in pytree.tree_leaves(output.to_tuple()) if isinstance(leaf, torch.Tensor)]


def test_attention_weights_that_are_returned_are_refused():
    torch._dynamo.reset()
    model, inputs, _ = hugging_face("bert")
    compiled = memopt.compile(model.eval(), backend="aten", passes=(FuseAttention(),))
    with torch.no_grad():
        compiled(**inputs, output_attentions=True)
    (record,) = compiled.report.passes
    assert [refusal.reason for refusal in record.refusals] == ["its probabilities are read by output too"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_device(dtype, causal):
    def function(q, k, v):
        scores = q @ k.mT / 8
        if causal:
            scores = scores.masked_fill(torch.ones(64, 64, device="cuda").tril() == 0, -INF)
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    args = [normal(2, 4, 64, 64, dtype=dtype, seed=i).cuda() for i in range(3)]
    result = fused(function, *args)
    assert any(name.startswith("aten._scaled_dot_product_") for name in names(result))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_hidden_wholly_on_a_device(dtype):
    def function(q, k, v, m):
        low = torch.finfo(q.dtype).min
        return (q @ k.mT / 8 + torch.where(m, 0.0, torch.tensor(low, dtype=q.dtype, device="cuda"))).softmax(-1) @ v

    args = [normal(2, 4, 64, 64, dtype=dtype, seed=i).cuda() for i in range(3)]
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device="cuda")
    mask[0, :, :, 40:] = False
    mask[1, :, 3:9] = False
    result = fused(function, *args, mask)
    assert any(name.startswith("aten._scaled_dot_product_") for name in names(result))
