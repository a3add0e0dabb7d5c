"""What the import of torchax would do to torch."""

import pytest
import torch

from memopt.torch_compat.torchax_import import without_renaming


def test_the_spare_device_keeps_its_name_within_the_block_alone():
    own = torch.utils.rename_privateuse1_backend, torch._register_device_module
    name = torch._C._get_privateuse1_backend_name()
    with pytest.raises(ValueError), without_renaming():
        torch.utils.rename_privateuse1_backend("jax")
        torch._register_device_module("jax", None)
        raise ValueError
    assert torch._C._get_privateuse1_backend_name() == name and not hasattr(torch, "jax")
    assert (torch.utils.rename_privateuse1_backend, torch._register_device_module) == own
