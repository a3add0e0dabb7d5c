"""Tensors as arrays and back: every type, every shape, every layout."""

import ml_dtypes
import numpy as np
import pytest
import torch

from memopt.convert.arrays import to_array, to_tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_there_and_back(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    array = to_array(tensor)
    assert array.shape == shape and array.dtype.itemsize == tensor.element_size()
    back = to_tensor(array)
    assert back.dtype is dtype and back.shape == shape and torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_laid_out_otherwise_or_trained(dtype):
    tensor = torch.randn(4, 6).to(dtype).t()[::2].requires_grad_()
    array = to_array(tensor)
    assert torch.equal(to_tensor(array), tensor.detach())
    np.testing.assert_array_equal(array.astype(np.float64), tensor.detach().double().numpy())


def test_bfloat16_is_the_type_that_numpy_has_from_elsewhere():
    array = to_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert array.dtype == ml_dtypes.bfloat16 and array.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_that_cannot_be_shared_are_copied(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    turned, spread = array[::-1, ::-1], np.broadcast_to(array[0], (2, 3))
    assert to_tensor(turned).tolist() == [[5, 4, 3], [2, 1, 0]]
    found = to_tensor(spread)
    found[0, 0] = 7
    assert found.tolist() == [[7, 1, 2], [0, 1, 2]] and array[0, 0] == 0


def test_an_array_that_can_be_shared_is():
    array = np.zeros(3, np.float32)
    to_tensor(array)[1] = 4
    assert array.tolist() == [0, 4, 0]


def test_what_pytorch_has_no_type_for():
    with pytest.raises(TypeError) as caught:
        to_tensor(np.array(["a", "b"], dtype=object))
    assert "\n" not in str(caught.value)
