"""Functions traced in place of others."""

import threading

import torch

from memopt.torch_compat.replaced_calls import replaced_calls


def plain(x):
    return x + 1


def other(x):
    return plain(x) * 2


def doubled(x, *rest):
    return x.sin()


def traced(function, x):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)(x)


def test_within_the_block_the_function_given_is_traced_and_calls_the_plain_one():
    x = torch.ones(2)
    with replaced_calls({plain: other}):
        assert traced(lambda x: plain(x), x).tolist() == [4, 4]
        with replaced_calls({}):
            assert traced(lambda x: plain(x), x).tolist() == [2, 2]
        found = []
        thread = threading.Thread(target=lambda: found.append(traced(lambda x: plain(x), x).tolist()))
        thread.start()
        thread.join()
        assert found == [[2, 2]], "in another thread tracing is as ever"
    assert traced(lambda x: plain(x), x).tolist() == [2, 2]


def test_operations_of_torch_s_are_replaced_as_well():
    x = torch.ones(2)
    with replaced_calls({torch.cos: doubled}):
        torch.testing.assert_close(traced(lambda x: torch.cos(x), x), x.sin())
    torch.testing.assert_close(traced(lambda x: torch.cos(x), x), x.cos())
