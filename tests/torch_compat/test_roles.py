from __future__ import annotations

from typing import Any

import torch

from memopt.torch_compat import roles
from memopt.torch_compat.aot_autograd import aot_autograd


def test_ends_of_a_joint_graph_say_what_they_are() -> None:
    found: dict[str, Any] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found["in"] = [node.meta["desc"] for node in joint.graph.find_nodes(op="placeholder")]
        found["out"] = joint.graph.output_node().meta["desc"]
        raise NotImplementedError("enough is seen")

    def unused(module: Any, inputs: Any) -> Any:
        return module.forward

    torch._dynamo.reset()
    lower = aot_autograd(fw_compiler=unused, bw_compiler=unused, partition_fn=partition)
    x, w = torch.ones(2), torch.ones(2, requires_grad=True)
    try:
        torch.compile(lambda x, w: (x * w).sum(), backend=lower)(x, w)
    except Exception as error:
        assert "enough is seen" in str(error)
    places = [roles.position_given(role) for role in found["in"]]
    assert sorted(place for place in places if place is not None) == [0, 1]
    assert [roles.is_tangent(role) for role in found["in"]].count(True) == 1
    gradients = [roles.gradient_of(role) for role in found["out"] if role is not None]
    assert any(role is not None and roles.position_given(role) is not None for role in gradients)
    assert not any(roles.updated_by(role) for role in found["out"])
    assert roles.updated_by(roles.updating(found["in"][0])) is found["in"][0]
