"""Sixty classes of transformers in small configs with random weights, and what each is trained with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.conversions import BLOCKS, GROUPED, IMAGE, SOUND, STAGES, T5, TEXT, TOKENS, TRANSLATION, WHISPER

# Inputs come in batches of two: so many of these make activations outweigh the small weights.
REPEATS = 4
GPT = {"vocab_size": 120, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, **GPT}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
STATE = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 120, "state_size": 8}
SPEECH = {
    "hidden_size": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 40,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "speech_decoder_prenet_units": 32,
    "speech_decoder_postnet_units": 32, "speaker_embedding_dim": 16,
}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
VITS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "flow_size": 16,
    "vocab_size": 40, "spectrogram_bins": 17, "upsample_initial_channel": 32, "upsample_rates": [4, 4],
    "upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
    "prior_encoder_num_wavenet_layers": 2, "posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_flows": 2,
    "duration_predictor_filter_channels": 32, "depth_separable_channels": 2,
}  # fmt: skip

# Kind, class, and what its small config says.
CLASSES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("encoder", "BertForMaskedLM", TEXT),
    ("encoder", "RobertaForSequenceClassification", TEXT),
    ("encoder", "DistilBertForQuestionAnswering", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TOKENS}),
    ("encoder", "AlbertForTokenClassification", {**TEXT, "embedding_size": 16}),
    ("encoder", "ElectraForPreTraining", {**TEXT, "embedding_size": 16}),
    ("encoder", "DebertaForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("encoder", "DebertaV2ForSequenceClassification", TEXT),
    ("encoder", "MPNetForMaskedLM", TEXT),
    ("encoder", "ModernBertForMaskedLM", {**TEXT, "pad_token_id": 0}),
    ("encoder", "LongformerForMaskedLM", {**TEXT, "attention_window": 8}),
    ("encoder", "BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}),
    ("encoder", "XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 120}),
    ("encoder", "FunnelForMaskedLM", {
        "vocab_size": 120, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "num_decoder_layers": 1,
    }),
    ("encoder", "FNetForMaskedLM", TEXT),
    ("encoder", "ReformerModelWithLMHead", {
        "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 64,
        "vocab_size": 120, "attn_layers": ["local", "local"], "is_decoder": True, "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 8, "max_position_embeddings": 16,
        # It seeds its dropout from the system's entropy: no two steps of eager's own are alike.
        "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    }),
    ("decoder", "GPT2LMHeadModel", GPT2),
    ("decoder", "GPTNeoForCausalLM", {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64, "window_size": 8, **GPT,
    }),
    ("decoder", "GPTNeoXForCausalLM", TEXT),
    ("decoder", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    ("decoder", "LlamaForCausalLM", GROUPED),
    ("decoder", "MistralForCausalLM", GROUPED),
    ("decoder", "Qwen2ForCausalLM", GROUPED),
    ("decoder", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    ("decoder", "GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    ("decoder", "Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
    ("decoder", "PhiForCausalLM", TEXT),
    ("decoder", "Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    ("decoder", "FalconForCausalLM", TEXT),
    ("decoder", "OPTForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("decoder", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120}),
    ("decoder", "OlmoForCausalLM", GROUPED),
    ("decoder", "StableLmForCausalLM", GROUPED),
    ("experts", "MixtralForCausalLM", EXPERTS),
    ("experts", "Qwen2MoeForCausalLM", {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }),
    ("experts", "SwitchTransformersForConditionalGeneration", {
        **T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "decoder_start_token_id": 0,
    }),
    ("state space", "MambaForCausalLM", STATE),
    ("state space", "Mamba2ForCausalLM", {**STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8}),
    ("encoder-decoder", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    ("encoder-decoder", "BartForConditionalGeneration", TRANSLATION),
    ("encoder-decoder", "MBartForConditionalGeneration", TRANSLATION),
    ("encoder-decoder", "MarianMTModel", {**TRANSLATION, "pad_token_id": 0}),
    ("encoder-decoder", "PegasusForConditionalGeneration", TRANSLATION),
    ("vision", "ViTForImageClassification", IMAGE),
    ("vision", "DeiTForImageClassification", IMAGE),
    ("vision", "BeitForImageClassification", IMAGE),
    ("vision", "Dinov2Model", IMAGE),
    ("vision", "SwinForImageClassification",
     {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    ("vision", "ConvNextForImageClassification", {**STAGES, "image_size": 32}),
    ("vision", "ResNetForImageClassification", {**RESNET, "image_size": 32}),
    ("vision", "SegformerForSemanticSegmentation",
     {**STAGES, "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 2], "image_size": 64}),
    ("vision", "MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25}),
    ("vision", "MobileViTForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        "num_attention_heads": 2,
    }),
    ("vision", "DetrForObjectDetection", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "num_queries": 6,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None,
    }),
    ("audio", "WhisperForConditionalGeneration", WHISPER),
    ("audio", "Wav2Vec2ForCTC", SOUND),
    ("audio", "HubertForCTC", SOUND),
    ("audio", "WavLMForCTC", SOUND),
    ("audio", "ASTForAudioClassification", {**BLOCKS, "max_length": 64, "num_mel_bins": 32, "patch_size": 8}),
    ("audio", "SpeechT5ForTextToSpeech", SPEECH),
    ("audio", "VitsModel", VITS),
    ("multimodal", "CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    ("multimodal", "SiglipModel", {"text_config": TEXT, "vision_config": IMAGE}),
    ("multimodal", "BlipForImageTextRetrieval", {
        "text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": IMAGE, "projection_dim": 16,
        "image_text_hidden_size": 16,
    }),
    ("multimodal", "LlavaForConditionalGeneration", {
        "text_config": {"model_type": "llama", **GROUPED}, "image_token_index": 5,
        "vision_config": {"model_type": "clip_vision_model", **IMAGE},
    }),
)  # fmt: skip


def names() -> list[str]:
    return [name for _, name, _ in CLASSES]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model under a fixed seed, and keyword arguments for a training step: with labels where it computes a loss."""
    from memopt.cli.conversion_inputs import derived_inputs

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    settings = next(found for _, other, found in CLASSES if other == name)
    torch.manual_seed(0)
    made = getattr(transformers, name)
    if name == "DetrForObjectDetection":
        backbone = transformers.ResNetConfig(**RESNET, out_features=["stage2"])
        settings = {**settings, "backbone_config": backbone}
    model = made(made.config_class(**settings))
    inputs = {key: torch.cat([value] * REPEATS) for key, value in _inputs(name, model, derived_inputs).items()}
    return model, {**inputs, **_labels(name, model, inputs)}


def _inputs(name: str, model: Any, derived: Any) -> dict[str, Any]:
    if name == "LlavaForConditionalGeneration":  # sixteen patches: as many places in the text
        ids = torch.randint(6, 120, (2, 24))
        ids[:, :16] = 5
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "DetrForObjectDetection":
        return {"pixel_values": torch.randn(2, 3, 64, 64)}
    if name == "SpeechT5ForTextToSpeech":
        return {"input_ids": torch.randint(5, 40, (2, 16)), "decoder_input_values": torch.randn(2, 12, 80)}
    found = derived(model)
    if "ids" not in "".join(found) or "decoder_input_ids" in found:
        return found
    found.pop("attention_mask", None) if name == "ReformerModelWithLMHead" else None
    return found


def _labels(name: str, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the model compute its own loss; nothing for those that have none."""
    batch = next(iter(inputs.values())).shape[0]
    words = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    generator = torch.Generator().manual_seed(1)
    if name.endswith(("SequenceClassification", "ImageClassification", "AudioClassification")):
        return {"labels": torch.randint(0, model.config.num_labels, (batch,), generator=generator)}
    if name.endswith(("TokenClassification", "ForPreTraining")):
        return {"labels": torch.randint(0, 2, words.shape, generator=generator)}
    if name.endswith("QuestionAnswering"):
        places = torch.randint(0, words.shape[1], (2, batch), generator=generator)
        return {"start_positions": places[0], "end_positions": places[1]}
    if name.endswith("ForCTC"):
        return {"labels": torch.randint(1, model.config.vocab_size, (batch, 4), generator=generator)}
    if name.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(0, model.config.num_labels, (batch, 64, 64), generator=generator)}
    if name in ("CLIPModel", "SiglipModel"):
        return {"return_loss": True}
    if name.endswith(("CausalLM", "MaskedLM", "LMHeadModel", "WithLMHead", "ConditionalGeneration", "MTModel")):
        return {"labels": words.clone()}
    return {}
