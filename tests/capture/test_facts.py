"""What a call's tensors are beside their values."""

import torch

from memopt.capture.facts import facts_of, other_fact, other_sharing, shared_memory


def test_strides_count_where_there_are_steps():
    assert facts_of(torch.ones(1, 4)) == facts_of(torch.ones(4, 1).t())
    line = other_fact("output 0", facts_of(torch.ones(4, 2)), facts_of(torch.ones(2, 4).t()))
    assert line == "output 0 has strides (1, 4), and (2, 1) in the model"
    line = other_fact("it", facts_of(torch.ones(2, requires_grad=True)), facts_of(torch.ones(2)))
    assert line == "it has no gradient, and has one in the model"


def test_tensors_share_memory_where_they_overlap():
    block, other = torch.zeros(8), torch.zeros(4, 2)
    tensors = {"a": block[:4], "b": block[4:], "c": block[2:6], "d": other.t(), "e": other, "f": block[:0]}
    shared = shared_memory(tensors)
    assert shared == {("a", "c"), ("b", "c"), ("d", "e")}
    assert other_sharing(shared, shared) is None
    assert other_sharing(shared, shared - {("d", "e")}) == "d and e share no memory, and do in the model"
    assert other_sharing(shared - {("d", "e")}, shared) == "d and e share memory, and do not in the model"
    assert not shared_memory({"sparse": torch.ones(2, 2).to_sparse(), "dense": block})
