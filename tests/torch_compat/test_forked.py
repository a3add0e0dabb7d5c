"""What is called as code is generated, and what a graph's results lie like."""

import torch

from memopt.torch_compat import forked


def test_what_convolutions_ask_is_asked_through_another_function():
    asked = []

    def around(name, plain):
        def ask(*args, **options):
            asked.append(name)
            return plain(*args, **options)

        return ask

    x, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    with torch._subclasses.FakeTensorMode() as mode, forked.libraries_asked_through(around):
        torch.nn.functional.conv2d(mode.from_tensor(x), mode.from_tensor(weight))
    assert asked
    asked.clear()
    with torch._subclasses.FakeTensorMode() as mode:
        torch.nn.functional.conv2d(mode.from_tensor(x), mode.from_tensor(weight))
    assert not asked
