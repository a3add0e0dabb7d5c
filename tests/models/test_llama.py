"""Llama: tokens see those before them by their distance, and a key and value head serves several query heads."""

import pytest
import torch

from memopt.models.llama import Llama, RMSNorm


def tiny(kv_heads=2):
    torch.manual_seed(0)
    return Llama(2, 32, 4, kv_heads, 64, vocabulary=50, sequence=8).eval()


def test_no_token_sees_those_behind_it():
    model, tokens = tiny(), torch.randint(50, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 50
    found, other = model(tokens), model(changed)
    torch.testing.assert_close(found[:, :5], other[:, :5])
    assert not torch.allclose(found[:, 5:], other[:, 5:])


def test_heads_that_serve_several_are_heads_of_equal_weights():
    shared, plain = tiny(), tiny(kv_heads=4)
    state = shared.state_dict()
    for name, value in state.items():
        if ".key." in name or ".value." in name:
            state[name] = value.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    plain.load_state_dict(state)
    tokens = torch.randint(50, (2, 8))
    torch.testing.assert_close(shared(tokens), plain(tokens))


def test_a_norm_is_computed_in_single_precision():
    norm, x = RMSNorm(8, 1e-6), torch.full((1, 8), 300.0, dtype=torch.float16)
    assert x.square().isinf().all()
    torch.testing.assert_close(norm.half()(x), torch.ones(1, 8, dtype=torch.float16))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError):
        tiny(kv_heads=3)
