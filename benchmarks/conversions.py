"""Convert every model of memopt.models and many classes of transformers, and put the outcome on record.

python -m benchmarks.conversions [NAME …]      writes benchmarks/results/conversions.json and conversions.md; with names
                                               only their rows are made again
"""

from __future__ import annotations

import json
import logging
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.render_conversions import conversions_table
from memopt import models
from memopt.cli.conversion_inputs import derived_inputs
from memopt.convert.options import Options
from memopt.convert.pipeline import convert_module

RESULTS = Path(__file__).resolve().parent / "results"

BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"vocab_size": 120, "max_position_embeddings": 64}
TEXT: dict[str, Any] = {**BLOCKS, **TOKENS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {**BLOCKS, "image_size": 32, "patch_size": 8}
HALVES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 120,
}  # fmt: skip
TRANSLATION = {**HALVES, "max_position_embeddings": 64}
SOUND = {
    **BLOCKS, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "vocab_size": 40,
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
WHISPER = {
    **HALVES, "max_source_positions": 50, "max_target_positions": 40, "num_mel_bins": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 120}

# Kind, class, and what its small config says. The config's class is named like the model's family.
CLASSES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("encoder", "BertForMaskedLM", "BertConfig", TEXT),
    ("encoder", "RobertaForSequenceClassification", "RobertaConfig", TEXT),
    ("encoder", "DistilBertForQuestionAnswering", "DistilBertConfig",
     {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TOKENS}),
    ("encoder", "AlbertForTokenClassification", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    ("encoder", "ElectraForTokenClassification", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    ("encoder", "DebertaV2ForSequenceClassification", "DebertaV2Config", TEXT),
    ("encoder", "MPNetForMaskedLM", "MPNetConfig", TEXT),
    ("encoder", "XLMRobertaModel", "XLMRobertaConfig", TEXT),
    ("encoder", "ModernBertForMaskedLM", "ModernBertConfig", {**TEXT, "pad_token_id": 0}),
    ("encoder", "CamembertForMaskedLM", "CamembertConfig", TEXT),
    ("encoder", "CLIPTextModel", "CLIPTextConfig", TEXT),
    ("decoder", "GPT2LMHeadModel", "GPT2Config",
     {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 120, "n_positions": 64}),
    ("decoder", "LlamaForCausalLM", "LlamaConfig", GROUPED),
    ("decoder", "MistralForCausalLM", "MistralConfig", GROUPED),
    ("decoder", "Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    ("decoder", "Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    ("decoder", "OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    ("decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    ("decoder", "BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 120}),
    ("decoder", "PhiForCausalLM", "PhiConfig", TEXT),
    ("decoder", "GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    ("decoder", "FalconForCausalLM", "FalconConfig", TEXT),
    ("decoder", "MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    ("decoder", "GPTJForCausalLM", "GPTJConfig",
     {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 120, "n_positions": 64, "rotary_dim": 4}),
    ("encoder-decoder", "T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    ("encoder-decoder", "BartForConditionalGeneration", "BartConfig", TRANSLATION),
    ("encoder-decoder", "MBartForConditionalGeneration", "MBartConfig", TRANSLATION),
    ("encoder-decoder", "MarianMTModel", "MarianConfig", {**TRANSLATION, "pad_token_id": 0}),
    ("encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig", TRANSLATION),
    ("vision", "ViTForImageClassification", "ViTConfig", IMAGE),
    ("vision", "DeiTForImageClassification", "DeiTConfig", IMAGE),
    ("vision", "BeitForImageClassification", "BeitConfig", IMAGE),
    ("vision", "Dinov2Model", "Dinov2Config", IMAGE),
    ("vision", "SwinForImageClassification", "SwinConfig",
     {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    ("vision", "ConvNextForImageClassification", "ConvNextConfig", {**STAGES, "image_size": 32}),
    ("vision", "ResNetForImageClassification", "ResNetConfig",
     {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32}),
    ("vision", "SegformerForSemanticSegmentation", "SegformerConfig",
     {**STAGES, "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 2], "image_size": 64}),
    ("vision", "MobileNetV2ForImageClassification", "MobileNetV2Config", {"image_size": 32, "depth_multiplier": 0.25}),
    ("vision", "CLIPModel", "CLIPConfig", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}),
    ("audio", "WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    ("audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND),
    ("audio", "HubertForCTC", "HubertConfig", SOUND),
    ("audio", "WavLMForCTC", "WavLMConfig", SOUND),
    ("audio", "ASTForAudioClassification", "ASTConfig",
     {**BLOCKS, "max_length": 64, "num_mel_bins": 32, "patch_size": 8}),
)  # fmt: skip


def convert(kind: str, name: str, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind, "model": name}
    started = time.perf_counter()
    try:
        record = convert_module(model, inputs, None, source=name, options=Options(measure=False))
    except Exception as error:
        row["refused"] = str(error).splitlines()[0][:160]
        return row
    outputs = [output for run in record.runs for output in run.outputs]
    row |= {
        "nodes_before": sum(record.nodes_before.values()),
        "nodes_after": sum(record.nodes_after.values()),
        "runs": [dict(run.sizes) for run in record.runs],
        "max_relative": max(output.max_relative for output in outputs),
        "seconds": round(time.perf_counter() - started, 1),
        "notes": list(record.notes),
    }
    return row


def rows(wanted: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in models.names():
        if not wanted or name in wanted:
            torch.manual_seed(0)
            built = models.build(name, tiny=True).eval()
            found.append(convert("memopt.models", name, built, built.example_inputs(2)))
            print(found[-1], file=sys.stderr, flush=True)
    for kind, name, config, settings in CLASSES:
        if not wanted or name in wanted:
            torch.manual_seed(0)
            made = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
            found.append(convert(kind, name, made, derived_inputs(made)))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    path, wanted = RESULTS / "conversions.json", sys.argv[1:]
    made = rows(wanted)
    if wanted:
        fresh = {row["model"]: row for row in made}
        made = [fresh.get(row["model"], row) for row in json.loads(path.read_text())["rows"]]
    result = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": made,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    table = conversions_table(result)
    path.with_suffix(".md").write_text(table)
    print(table, end="")
    refused = [row["model"] for row in made if "refused" in row]
    if refused:
        sys.exit(f"{len(refused)} models are refused: {', '.join(refused)}")


if __name__ == "__main__":
    main()
