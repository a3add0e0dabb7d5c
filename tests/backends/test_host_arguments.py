"""A tensor on the host, such as a float that a schedule sets, is in no CUDA graph: its value would stay."""

import pytest
import torch

from memopt.backends.cuda_capture import CudaGraphCapturer
from memopt.backends.cuda_graph import Replay
from memopt.cuda_graphs.step import NotCapturable


def test_a_half_that_takes_a_tensor_on_the_host_is_not_captured():
    with pytest.raises(NotCapturable, match="on the host"):
        CudaGraphCapturer().capture(lambda arguments: arguments, [torch.tensor(2.0, dtype=torch.float64), 3])


@pytest.mark.gpu
def test_a_call_that_takes_a_tensor_on_the_host_runs_without_a_graph():
    replay = Replay(lambda value: [2 * value], [0])
    for value in (1.0, 2.0, 3.0):
        assert replay(torch.tensor(value))[0] == 2 * value
    assert "on the host" in replay.impossible
