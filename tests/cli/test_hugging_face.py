import json

import pytest
import torch

from memopt.cli.group import CommandError
from memopt.cli.loading import Request, load

transformers = pytest.importorskip("transformers")


def small(kind: str):
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    if kind == "vit":
        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=16,
            patch_size=8,
        )
        return transformers.ViTForImageClassification(config)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gpt2", "vit", "t5"])
@pytest.mark.parametrize("training", [True, False])
def test_folder_with_weights(tmp_path, kind, training):
    model = small(kind)
    model.save_pretrained(tmp_path)
    found = load(Request(str(tmp_path), batch=3, training=training))
    assert type(found.model) is type(model)
    assert found.model.training == training
    for name, value in model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value)
    assert all(value.shape[0] == 3 for value in found.inputs.values())
    outputs = found.model(**found.inputs)
    assert (outputs.loss is not None) == training


def test_folder_without_weights_gets_random_ones(tmp_path):
    small("gpt2").config.save_pretrained(tmp_path)
    assert isinstance(load(Request(str(tmp_path))).model, transformers.GPT2Model)


def test_pickled_weights_are_refused_unless_trusted(tmp_path):
    model = small("gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CommandError, match="add --trust-pickle"):
        load(Request(str(tmp_path)))
    assert load(Request(str(tmp_path), trust_pickle=True)).model is not None


@pytest.mark.parametrize("content", ["{}", "not json", json.dumps({"model_type": "no-such-model"})])
def test_bad_config_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CommandError, match=r"config.json cannot be read"):
        load(Request(str(tmp_path)))
