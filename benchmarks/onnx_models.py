"""The models that `onnx_files.py` compares: memopt's own for images, classes of transformers from configs else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Name → sizes of its inputs. Batch one, as most people run them.
NAMES = (
    "resnet50", "mobilenet_v3_large", "densenet121", "unet", "vit_base", "bert_base", "gpt2", "llama_small",
    "t5_encoder", "whisper_encoder",
)  # fmt: skip
_SEQUENCE = 128
_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def build(name: str, tiny: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in eval mode and its inputs, always the same ones. Batch two: exporting takes one for fixed."""
    torch.manual_seed(0)
    if name in NAMES[:4]:
        from memopt import models

        model: Any = models.build(name, tiny=tiny)
        inputs = model.example_inputs(2, **({} if tiny or name != "unet" else {"resolution": 128}))
    else:
        model, inputs = _transformers(name, tiny)
    settled(model)
    return model.eval(), inputs


@torch.no_grad()
def settled(model: nn.Module) -> None:
    """Give constant vectors values that training would have left: removing additions of zero would prove little."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    for value in model.parameters():
        if value.ndim <= 1 and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            value.add_(torch.empty_like(value).normal_(0.0, 0.05, generator=generator))


def _transformers(name: str, tiny: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers

    ids = torch.randint(5, 100 if tiny else 20_000, (2, 16 if tiny else _SEQUENCE))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    small = {**_BLOCKS, "vocab_size": 120, "max_position_embeddings": 64}
    if name == "bert_base":
        model = transformers.BertModel(transformers.BertConfig(**(small if tiny else {})))
        return model, text
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 120, "n_positions": 64} if tiny else {}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes)), text
    if name == "llama_small":
        sizes = {**small, "num_key_value_heads": 2}
        if not tiny:
            sizes = {
                "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
                "intermediate_size": 2048,
            }  # fmt: skip
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **sizes)), text
    if name == "t5_encoder":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 120}
        config = transformers.T5Config(use_cache=False, **(sizes if tiny else {}))
        return transformers.T5EncoderModel(config), text
    if name == "whisper_encoder":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        sizes = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
        if tiny:
            sizes = {
                "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
                "max_source_positions": 50, "num_mel_bins": 16,
            }  # fmt: skip
        config = transformers.WhisperConfig(**sizes)
        features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        return WhisperEncoder(config), {"input_features": features}
    if name == "vit_base":
        config = transformers.ViTConfig(**({**_BLOCKS, "image_size": 32, "patch_size": 8} if tiny else {}))
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
    raise ValueError(f"no model {name!r}; known: {', '.join(NAMES)}")
