"""Models of transformers with random weights, and batches as their users feed them, for user_loop.py."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

# Batch and length, or batch alone, of each model's rows.
SIZES: dict[str, dict[str, int]] = {
    "gpt2_medium": {"batch": 12, "length": 1024},
    "bert_large": {"batch": 32, "length": 512},
    "llama_1b": {"batch": 4, "length": 2048},
    "llama_1b_lora": {"batch": 4, "length": 2048},
    "qwen3_0.6b": {"batch": 4, "length": 2048},
    "t5_large": {"batch": 8, "length": 512},
    "whisper_small": {"batch": 16, "length": 128},
    "vit_large": {"batch": 64},
}
TINY = {"batch": 2, "length": 32}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def built(name: str, *, tiny: bool = False) -> nn.Module:
    """A model by its name, in float32 and in training mode.

    Raises:
        KeyError: no such model.
        ModuleNotFoundError: transformers, or for LoRA peft, is not installed.
    """
    torch.manual_seed(0)
    model: nn.Module = _MAKERS[name](tiny)
    return model.train()


def batches(
    name: str, count: int, sizes: dict[str, int], *, tiny: bool, device: str, varied: bool = False
) -> list[dict[str, Any]]:
    """Different batches for a loop, on the device: `forward`'s keyword arguments, labels among them.

    Varied ones have each a size of their own, of at least one row and an eighth of the length; one is the largest.
    """
    torch.manual_seed(1)
    draw = random.Random(0)
    made = [_batch(name, _smaller(sizes, draw) if varied else sizes, tiny) for _ in range(count)]
    if varied:
        made[draw.randrange(count)] = _batch(name, sizes, tiny)
    return [{key: value.to(device) for key, value in batch.items()} for batch in made]


def _smaller(sizes: dict[str, int], draw: random.Random) -> dict[str, int]:
    least = {key: 1 if key == "batch" else max(2, most // 8) for key, most in sizes.items()}
    return {key: draw.randint(least[key], most) for key, most in sizes.items()}


def _batch(name: str, sizes: dict[str, int], tiny: bool) -> dict[str, Any]:
    batch, length = sizes["batch"], sizes.get("length", 0)
    if name == "vit_large":
        side = 32 if tiny else 224
        return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 10, (batch,))}
    if name == "whisper_small":
        frames = 64 if tiny else 3000
        return {
            "input_features": torch.randn(batch, 80, frames),
            "labels": torch.randint(0, 1000, (batch, min(length, 32) if tiny else length)),
        }
    ids = torch.randint(0, 1000, (batch, length))
    if name == "t5_large":
        return {"input_ids": ids, "labels": torch.randint(0, 1000, (batch, max(1, length // 4)))}
    if name == "bert_large":
        labels = torch.where(torch.rand(batch, length) < 0.15, ids, -100)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {"input_ids": ids, "labels": ids}


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if tiny else {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**(_SMALL if tiny else _BERT)))


def _llama(tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 1024}
    large = {**_LLAMA, "num_key_value_heads": 8, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(**(sizes if tiny else large), use_cache=False))


def _llama_lora(tiny: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(_llama(tiny), adapter)
    return adapted


def _qwen3(tiny: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}
    large = {**_QWEN, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    return Qwen3ForCausalLM(Qwen3Config(**(sizes if tiny else large), tie_word_embeddings=True, use_cache=False))


def _t5(tiny: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    large = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "d_kv": 64}
    return T5ForConditionalGeneration(T5Config(**(small if tiny else large), decoder_start_token_id=0, use_cache=False))


def _whisper(tiny: bool) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads = 4 if tiny else 12
    ends = {f"{end}_attention_heads": heads for end in ("encoder", "decoder")}
    ends |= {f"{end}_layers": 2 if tiny else 12 for end in ("encoder", "decoder")}
    ends |= {f"{end}_ffn_dim": 128 if tiny else 3072 for end in ("encoder", "decoder")}
    sizes = {"d_model": 64 if tiny else 768, "max_source_positions": 32 if tiny else 1500, **ends}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, use_cache=False))


def _vit(tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    side = {"image_size": 32, "patch_size": 8} if tiny else {"image_size": 224, "patch_size": 16}
    return ViTForImageClassification(ViTConfig(**(_SMALL if tiny else _BERT), **side, num_labels=10))


_MAKERS = {
    "gpt2_medium": _gpt2,
    "bert_large": _bert,
    "llama_1b": _llama,
    "llama_1b_lora": _llama_lora,
    "qwen3_0.6b": _qwen3,
    "t5_large": _t5,
    "whisper_small": _whisper,
    "vit_large": _vit,
}
