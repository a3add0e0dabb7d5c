"""Key-value caches are off while a model is converted, and whatever happens the model is what it was."""

import pytest
import torch
from torch import nn

from memopt.convert.key_values import is_hugging_face, without_cache


class Config:
    def __init__(self, use_cache=True, experts=None):
        self.use_cache = use_cache
        self._experts_implementation = experts


class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


class Model(Part):
    """As models of transformers look from outside."""

    main_input_name = "input_ids"

    def __init__(self, config, *parts, refuses=False):
        super().__init__(config)
        self.parts, self.refuses = nn.ModuleList(parts), refuses

    def set_experts_implementation(self, name):
        for part in self.modules():
            if isinstance(getattr(part, "config", None), Config):
                part.config._experts_implementation = name
        if self.refuses:
            raise RuntimeError("experts cannot be switched")


def test_what_is_a_model_of_transformers():
    assert is_hugging_face(Model(Config()))
    assert not is_hugging_face(nn.Linear(2, 2)) and not is_hugging_face(Part(Config())) and not is_hugging_face(None)


def test_all_parts_are_without_a_cache_and_get_theirs_back():
    own, inner, other = Config(True, "grouped_mm"), Config(False, "eager"), Config(True, "eager")
    model = Model(own, Part(inner), Part(other), Part(own))
    with without_cache(model):
        assert [config.use_cache for config in (own, inner, other)] == [False] * 3
        assert {config._experts_implementation for config in (own, inner, other)} == {"batched_mm"}
    assert [config.use_cache for config in (own, inner, other)] == [True, False, True]
    assert [config._experts_implementation for config in (own, inner, other)] == ["grouped_mm", "eager", "eager"]


def test_an_error_inside_leaves_the_model_as_it_was():
    model = Model(Config(True, "eager"))
    with pytest.raises(KeyboardInterrupt), without_cache(model):
        raise KeyboardInterrupt
    assert model.config.use_cache and model.config._experts_implementation == "eager"


def test_a_model_that_refuses_other_experts_is_left_as_it_was():
    model = Model(Config(True, "megamoe"), refuses=True)
    with pytest.raises(RuntimeError, match="cannot be switched"), without_cache(model):
        pytest.fail("the block is not run")
    assert model.config.use_cache and model.config._experts_implementation == "megamoe"


def test_other_models_and_parts_without_such_settings_pass():
    with without_cache(nn.Linear(2, 2)):
        pass
    model = Model(Config())
    model.parts.append(Part({"use_cache": True}))
    model.parts.append(Part(None))
    with without_cache(model):
        assert model.parts[0].config == {"use_cache": True}
    assert model.config.use_cache


def test_a_mixture_of_experts():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    before = model.config._experts_implementation
    ids = torch.ones(1, 3, dtype=torch.int64)
    with torch.no_grad(), without_cache(model):
        assert model(ids).past_key_values is None
    with torch.no_grad():
        assert model(ids).past_key_values is not None and model.config._experts_implementation == before
