"""What a call's arguments are to the loop around it; what loops hold is in tests/training/test_loops.py."""

import torch

from memopt.step.around import Around


def left_to_a_call(made, given):
    """Bytes that earlier calls have left, of 4,096, to a call with these arguments; the loop has made tensors there."""
    around = Around()
    around._made = frozenset(tensor.untyped_storage().data_ptr() for tensor in made)
    around.begins(4096, new_step=False, given=given)
    return around._left


def test_what_the_loop_made_and_gives_to_a_call_is_counted_with_the_call():
    made, other = torch.ones(16), torch.ones(16)
    assert left_to_a_call([made], ((made[:4], made), {"y": other})) == 4096 - 64
    assert left_to_a_call([made], ((other,), {})) == left_to_a_call([], ((made,), {})) == 4096
    parts = torch.eye(4).to_sparse()
    assert left_to_a_call([parts._values()], ((parts,), {})) == 4096 - 16


def test_an_argument_without_a_storage_takes_none_of_it():
    assert left_to_a_call([torch.ones(1)], ((torch.ones(2, 2).to_mkldnn(),), {})) == 4096
