import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.cli.conftest import assert_one_line
from tests.convert.conftest import _unmeasured  # noqa: F401

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def make(kind, layers=1):
    small = {**SMALL, "num_hidden_layers": layers}
    tokens = {**small, "vocab_size": 100, "max_position_embeddings": 64}
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**tokens))
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**tokens, num_key_value_heads=2))
    if kind == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=32, patch_size=8))
    if kind == "wav2vec2":
        convolutions = {"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
        positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 40}
        return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**small, **convolutions, **positions))
    if kind == "whisper":
        config = transformers.WhisperConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, max_source_positions=50, max_target_positions=40,
            num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config)
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.quick("bert-*")
@pytest.mark.parametrize(
    ("kind", "inputs", "outputs"),
    [
        ("bert", ["input_ids", "attention_mask", "token_type_ids"], ["logits"]),
        ("llama", ["input_ids", "attention_mask"], ["logits"]),
        ("t5", ["input_ids", "attention_mask", "decoder_input_ids"], ["logits", "encoder_last_hidden_state"]),
        ("vit", ["pixel_values"], ["logits"]),
        ("wav2vec2", ["input_values"], ["logits"]),
        ("whisper", ["input_features", "decoder_input_ids"], ["logits", "encoder_last_hidden_state"]),
    ],
)
def test_folder_to_onnx_with_batch_and_sequence_dynamic(run, folder, kind, inputs, outputs):
    model = make(kind, layers=2 if kind == "bert" else 1).eval()
    model.save_pretrained(folder / "checkpoint")
    result = run("convert", "checkpoint", "-o", "m.onnx")
    assert result.exit_code == 0, result.stderr
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_inputs()] == inputs
    assert [entry.name for entry in session.get_outputs()] == outputs
    feeds = {}
    for entry in session.get_inputs():
        sizes = [
            {"batch": 3, "sequence": 11 if entry.type == "tensor(int64)" else 900}.get(size, size)
            for size in entry.shape
        ]
        sizes = [7 if isinstance(size, str) else size for size in sizes]
        feeds[entry.name] = torch.randn(sizes) if "float" in entry.type else torch.ones(sizes, dtype=torch.int64)
    with torch.no_grad():
        expected = model(**feeds)[outputs[0]]
    found = session.run([outputs[0]], {name: value.numpy() for name, value in feeds.items()})[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_another_head_by_task(run, folder):
    make("bert").save_pretrained(folder / "checkpoint")
    assert_one_line(run("convert", "checkpoint", "--task", "fill-mask", "-o", "m.onnx"), 1, "checkpoint does not fit")
    assert_one_line(run("convert", "checkpoint", "--task", "poetry", "-o", "m.onnx"), 2, "unknown task 'poetry'")
    assert_one_line(
        run("convert", "checkpoint", "--task", "depth-estimation", "-o", "m.onnx"), 2, "bert models have no head for"
    )
    result = run("convert", "checkpoint", "--task", "feature-extraction", "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.stderr
    names = [entry["name"] for entry in json.loads(result.stdout)["report"]["outputs"]]
    assert names == ["last_hidden_state", "pooler_output"]


def test_missing_weights_are_named_not_made_up(run, folder):
    model = make("bert")
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "classifier.weight"}
    model.save_pretrained(folder / "checkpoint", state_dict=weights)
    result = run("convert", "checkpoint", "-o", "m.onnx")
    assert_one_line(result, 1, "does not fit BertForSequenceClassification: 1 missing (classifier.weight)")
    assert not (folder / "m.onnx").exists()


@pytest.mark.long
def test_sharded_weights(run, folder):
    model = make("llama").eval()
    model.save_pretrained(folder / "checkpoint", max_shard_size="20KB")
    assert len(list((folder / "checkpoint").glob("*.safetensors"))) > 2
    assert run("convert", "checkpoint", "-o", "m.onnx").exit_code == 0


@pytest.mark.quick("vit-bfloat16")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("bert", "float16"),
        ("vit", "bfloat16"),
        pytest.param("bert", "bfloat16", marks=pytest.mark.slow),
        pytest.param("vit", "float16", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_in_lower_precision_stay_in_it(run, folder, kind, dtype):
    make(kind).eval().to(getattr(torch, dtype)).save_pretrained(folder / "checkpoint")
    result = run("convert", "checkpoint", "-o", "m.onnx", "--no-measure")
    assert result.exit_code == 0, result.stderr
    assert "the result of each operator in lower precision rounded to its type" in result.stdout
    assert ("the file itself was not run" in result.stdout) is (dtype == "bfloat16")
    weights = (folder / "checkpoint" / "model.safetensors").stat().st_size
    assert (folder / "m.onnx").stat().st_size < weights + 60_000  # of the graph itself
    kinds = {item.data_type for item in onnx.load(folder / "m.onnx").graph.initializer if len(item.dims) > 1}
    assert getattr(onnx.TensorProto, dtype.upper()) in kinds and onnx.TensorProto.FLOAT not in kinds


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [pytest.param(("--dtype", "fp32"), marks=pytest.mark.slow), ("--dtype", "fp16"), ("--quantize", "int8")]
)
def test_a_checkpoint_in_bfloat16_becomes_a_file_that_every_cpu_runs(run, folder, words):
    model = make("llama").eval().to(torch.bfloat16)
    model.save_pretrained(folder / "checkpoint")
    result = run("convert", "checkpoint", *words, "-o", "m.onnx", "--no-measure")
    assert result.exit_code == 0, result.stderr
    ids = torch.randint(5, 100, (2, 9))
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": np.ones((2, 9), np.int64)})[0]
    with torch.no_grad():
        expected = model.float()(ids).logits.numpy()
    allowed = {"fp32": 1e-5, "fp16": 0.02, "int8": 0.08}[words[1]]
    assert found.dtype == np.float32 and np.abs(found - expected).max() <= allowed * np.abs(expected).max()


@pytest.mark.long
def test_a_folder_called_like_a_built_in_model_is_not_passed_over(run, folder):
    make("bert").eval().save_pretrained(folder / "gpt2")
    assert_one_line(run("convert", "gpt2", "-o", "m.onnx"), 2, "write ./gpt2 for the folder")
    result = run("convert", "./gpt2", "-o", "m.onnx", "--no-measure")
    assert result.exit_code == 0 and result.stdout.startswith("gpt2 → m.onnx")
    assert run("convert", "gpt2:tiny", "-o", "tiny.onnx", "--no-measure", "--passes", "").exit_code == 0
