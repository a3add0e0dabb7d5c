"""Against the implementations in transformers: equal parameter counts, and equal outputs with the same weights."""

import pytest
import torch

from memopt import models
from memopt.models.bert import Encoder
from memopt.models.llama import RotaryScaling, rotary_angles

transformers = pytest.importorskip("transformers")

SHORT = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
LLAMA_1B = {
    "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def load(mine, theirs, renames, convert=None):
    """Copy their weights: `convert` the whole table, then rewrite each name by the (old, new) pairs in order."""
    state = {}
    for name, value in (convert(theirs.state_dict()) if convert else theirs.state_dict()).items():
        for old, new in renames:
            name = name.replace(old, new)
        state[name] = value
    mine.load_state_dict(state)


def assert_close(found, expected):
    # Their losses are taken in single precision whatever the model is.
    tolerance = 1e-10 if expected.dtype is torch.float64 else 1e-6
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=tolerance, atol=tolerance)


def both(mine, theirs):
    return mine.double().eval(), theirs.double().eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {}), ("gpt2_medium", {"n_layer": 24, "n_embd": 1024, "n_head": 16})],
)
def test_gpt2_counts(name, options):
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
        assert count(models.build(name)) == count(theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert_base", {}),
        (
            "bert_large",
            {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        ),
    ],
)
def test_bert_counts(name, options):
    config = transformers.BertConfig(**options)
    sizes = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.intermediate_size)
    with torch.device("meta"):
        assert count(models.build(name)) == count(transformers.BertForMaskedLM(config))
        with_pooler = count(Encoder(*sizes))
        assert with_pooler == count(transformers.BertModel(config))
    assert with_pooler == {"bert_base": 109_482_240, "bert_large": 335_141_888}[name]


def test_vit_and_llama_counts():
    with torch.device("meta"):
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        assert count(models.build("vit_b_16")) == count(vit)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_1B))
        assert count(models.build("llama_1b")) == count(llama)


def test_gpt2_outputs():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    mine, theirs = both(models.build("gpt2:tiny"), transformers.GPT2LMHeadModel(config))
    renames = [
        ("transformer.wte", "tokens"), ("transformer.wpe", "positions"), ("transformer.h.", "blocks."),
        ("transformer.ln_f", "norm"), ("lm_head", "head"), ("ln_1", "norm1"), ("ln_2", "norm2"),
        ("attn.c_attn", "attention.qkv"), ("attn.c_proj", "attention.projection"), ("mlp.c_fc", "expand"),
        ("mlp.c_proj", "projection"),
    ]  # fmt: skip

    def transpose(state):  # their linear layers keep a matrix the other way round
        return {name: value.t() if ".c_" in name and value.ndim == 2 else value for name, value in state.items()}

    load(mine, theirs, renames, transpose)
    inputs = mine.example_inputs(3, labels=True)
    expected = theirs(**inputs)
    assert_close(mine(inputs["input_ids"]), expected.logits)
    assert_close(mine(**inputs), expected.loss)


BERT_NAMES = [
    ("word_embeddings", "tokens"), ("position_embeddings", "positions"), ("token_type_embeddings", "segments"),
    ("embeddings.LayerNorm", "norm"), ("embeddings.", ""), ("encoder.layer.", "layers."),
    ("attention.self.", ""), ("attention.output.dense", "projection"), ("attention.output.LayerNorm", "norm1"),
    ("intermediate.dense", "expand"), ("output.dense", "contract"), ("output.LayerNorm", "norm2"),
    ("pooler.dense", "pooler.0"),
]  # fmt: skip


def bert_inputs():
    inputs = models.build("bert_base:tiny").example_inputs(3, labels=True)
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    return inputs | {"attention_mask": mask, "token_type_ids": (torch.arange(16) > 7).long().expand(3, 16)}


def test_bert_outputs():
    config = transformers.BertConfig(**SHORT, vocab_size=128, max_position_embeddings=32)
    mine, theirs = both(models.build("bert_base:tiny"), transformers.BertForMaskedLM(config))
    head = [
        ("cls.predictions.transform.dense", "transform.0"), ("cls.predictions.transform.LayerNorm", "transform.2"),
        ("cls.predictions.decoder", "head"), ("cls.predictions.bias", "head.bias"),
    ]  # fmt: skip
    renames = [*head, *BERT_NAMES, ("bert.", "encoder.")]
    load(mine, theirs, renames)
    for inputs in (bert_inputs(), mine.example_inputs(2, sequence=5, labels=True)):
        expected = theirs(**inputs)
        assert_close(mine(**inputs), expected.loss)
        del inputs["labels"]
        assert_close(mine(**inputs), expected.logits)


def test_bert_pooled_output():
    config = transformers.BertConfig(**SHORT, vocab_size=128, max_position_embeddings=32)
    mine = Encoder(2, 32, 4, 64, vocabulary=128, positions=32)
    mine, theirs = both(mine, transformers.BertModel(config))
    load(mine, theirs, BERT_NAMES)
    inputs = bert_inputs()
    del inputs["labels"]
    assert_close(mine(**inputs), theirs(**inputs).pooler_output)


def test_vit_outputs():
    config = transformers.ViTConfig(**SHORT, image_size=32, patch_size=8, num_labels=10, layer_norm_eps=1e-6)
    mine, theirs = both(models.build("vit_b_16:tiny"), transformers.ViTForImageClassification(config))
    renames = [
        ("vit.embeddings.cls_token", "class_token"), ("vit.embeddings.position_embeddings", "positions"),
        ("vit.embeddings.patch_embeddings.projection", "patches"), ("vit.layers.", "blocks."),
        ("vit.layernorm", "norm"), ("classifier", "head"), ("attention.o_proj", "attention.projection"),
        ("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("mlp.fc1", "mlp.0"), ("mlp.fc2", "mlp.3"),
    ]  # fmt: skip

    def merge(state):  # their queries, keys and values come from three layers
        merged = {
            name: value for name, value in state.items() if not {"q_proj", "k_proj", "v_proj"} & {*name.split(".")}
        }
        for name in state:
            if "q_proj" in name:
                parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                merged[name.replace("q_proj", "qkv")] = torch.cat(parts)
        return merged

    load(mine, theirs, renames, merge)
    inputs = mine.example_inputs(3)
    assert_close(mine(**inputs), theirs(pixel_values=inputs["images"]).logits)


def test_llama_outputs():
    config = transformers.LlamaConfig(
        **SHORT, num_key_value_heads=2, vocab_size=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=131072, rope_parameters=ROPE,
    )  # fmt: skip
    mine, theirs = both(models.build("llama_1b:tiny"), transformers.LlamaForCausalLM(config))
    renames = [
        ("model.embed_tokens", "tokens"), ("model.layers.", "blocks."), ("model.norm", "norm"), ("lm_head", "head"),
        ("input_layernorm", "norm1"), ("post_attention_layernorm", "norm2"), ("self_attn.q_proj", "attention.query"),
        ("self_attn.k_proj", "attention.key"), ("self_attn.v_proj", "attention.value"),
        ("self_attn.o_proj", "attention.projection"), ("mlp.gate_proj", "gate"), ("mlp.up_proj", "up"),
        ("mlp.down_proj", "down"),
    ]  # fmt: skip
    load(mine, theirs, renames)
    inputs = mine.example_inputs(3, labels=True)
    expected = theirs(**inputs)
    # Their norms and rotations are computed in single precision whatever the model is.
    torch.testing.assert_close(mine(inputs["input_ids"]), expected.logits, rtol=1e-5, atol=1e-6)
    assert_close(mine(**inputs), expected.loss)


def test_llama_rotations():
    config = transformers.LlamaConfig(**LLAMA_1B, rope_parameters=ROPE)
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)
    found = rotary_angles(torch.ones(1), 64, 500000.0, RotaryScaling())
    torch.testing.assert_close(found[0], inverse)
