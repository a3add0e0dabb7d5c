from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.torch_compat import tracing_context
from memopt.torch_compat.fake_tensors import FakeTensorMode


def test_a_trace_is_seen_while_it_is_under_way() -> None:
    seen: list[Any] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        seen.append((tracing_context.in_trace(), tracing_context.context() is not None))
        with tracing_context.out_of_trace():
            seen.append(tracing_context.in_trace())
        seen.append(tracing_context.in_trace())
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == [(True, True), False, True]
    assert not tracing_context.in_trace()


def test_where_none_is_under_way() -> None:
    with pytest.raises(RuntimeError):
        tracing_context.context()
    assert tracing_context.fake_mode_here() is None
    with FakeTensorMode() as mode:
        assert tracing_context.fake_mode_here() is mode
