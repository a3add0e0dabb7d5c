"""Joint graphs with symbolic sizes, as they are at one."""

from __future__ import annotations

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from memopt.capture.at_sizes import at_sizes
from memopt.torch_compat.symbols import UnknownSizeError, hints_of


def joint_of(function, *inputs):
    """The joint graph with symbols of a function, and the sizes that it was captured at."""
    found = []

    def compiled(module, _):
        return make_boxed_func(module.forward)

    def backend(module, example_inputs):
        def cut(joint, joint_inputs, **options):
            from torch._functorch.partitioners import default_partition

            found.append((joint, hints_of(example_inputs)))
            return default_partition(joint, joint_inputs, **options)

        return aot_module_simplified(
            module, example_inputs, fw_compiler=compiled, bw_compiler=compiled, partition_fn=cut
        )

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(*inputs)
    return found[0]


def test_every_value_has_the_sizes_of_a_call():
    weight = torch.randn(6, 6, requires_grad=True)

    def loss(x):
        return (x.flatten(0, 1) @ weight).view(x.shape[0], -1).sum(1).square().mean() * x.shape[1]

    joint, hints = joint_of(loss, torch.randn(4, 5, 6))
    names = {size: symbol for symbol, size in hints.items()}
    for batch, length in ((4, 5), (3, 9)):
        module = at_sizes(joint, {names[4]: batch, names[5]: length, **({names[6]: 6} if 6 in names else {})})
        values = [node.meta["val"] for node in module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert (batch * length, 6) in [tuple(value.shape) for value in values]
        assert all(isinstance(size, int) for value in values for size in (*value.shape, *value.stride()))
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in joint.graph.nodes)  # it is as it was


def test_a_size_that_is_not_known_is_refused():
    weight = torch.randn(6, requires_grad=True)
    joint, _ = joint_of(lambda x: (x * weight).sum(), torch.randn(4, 6))
    with pytest.raises(UnknownSizeError):
        at_sizes(joint, {})
