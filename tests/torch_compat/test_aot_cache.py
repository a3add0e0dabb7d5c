"""AOTAutograd's cache, looked in, filled and written by hand."""

import pytest
import torch
from torch._functorch import config

from memopt.torch_compat import aot_cache
from tests.inductor.test_peak_lower_bound import needs_compiler


def train(model, x):
    torch._dynamo.reset()
    with config.patch(force_non_lazy_backward_lowering=True):
        torch.compile(model, backend="inductor")(x).sum().backward()


@needs_compiler
def test_an_entry_that_was_kept_and_written_is_found_under_its_key(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), torch.ones(2, 3)
    keys, kept = [], []
    with pytest.raises(Exception) as error, aot_cache.only_found(keys.append):
        train(model, x)
    assert "AbsentError" in repr(error.value) or isinstance(error.value.__cause__, aot_cache.AbsentError)
    with config.patch(bundled_autograd_cache=False), aot_cache.entries_to(keys[0], kept.append, lambda plain: plain):
        train(model, x)
    assert len(keys) == 1 and len(kept) == 1
    aot_cache.write(keys[0], kept[0], alone=True)
    with aot_cache.only_found(keys.append):
        train(model, x)
    assert keys == [keys[0]] * 2
