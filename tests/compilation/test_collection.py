"""Whether graphs are planned as they come, or collected first."""

import pytest

from memopt.compilation.collection import Collection


def test_graphs_are_collected_within_the_block_alone_and_not_begun_twice():
    collection = Collection(possible=True)
    assert collection.graphs is None and collection.may_begin
    with pytest.raises(ValueError), collection.collecting() as found:
        assert collection.graphs is found == [] and not collection.may_begin
        raise ValueError
    assert collection.graphs is None and collection.may_begin


def test_each_state_ends_with_its_block_whatever_happens():
    collection = Collection()
    assert not collection.possible
    for block, name, within in (
        (collection.rehearsal, "rehearsing", True),
        (collection.all_known, "complete", True),
        (collection.done, "possible", False),
    ):
        with pytest.raises(ValueError), block():
            assert getattr(collection, name) is within
            raise ValueError
        assert getattr(collection, name) is not within
