"""What torch's optimizers go by when they choose how to step, and fakes of what they step.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo import eval_frame
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer

from memopt.torch_compat.patched import replaced


def fakes_without_address() -> FakeTensorMode:
    """A mode whose tensors raise where a kernel of an optimizer's own asks for their address, and do not give zero."""
    with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode()


@contextlib.contextmanager
def fakes_as_if_real() -> Iterator[None]:
    """Within: optimizers choose for fake parameters as for real ones, and what torch.compile made of a step is not run.

    Its code writes to addresses, which fake parameters do not have. `torch.compiler.set_stance` says the same, but two
    threads that overlap in it would leave it in force.
    """
    types: list[Any] = optimizer._foreach_supported_types
    types.append(FakeTensor)
    try:
        with replaced(eval_frame, "_stance", eval_frame.DynamoStance("force_eager")):
            yield
    finally:
        types.remove(FakeTensor)
