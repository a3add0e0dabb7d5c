from __future__ import annotations

import torch

from memopt.memory.places import places_of, same_places


def test_tensors_are_told_from_others_by_where_they_lie():
    values = [torch.ones(2), 3, torch.ones(2), torch.ones(3)]
    places = places_of(values)
    assert places[1] == 0 and places[0] == values[0].data_ptr()
    assert same_places(values, places, [0, 2, 3])
    values[2] = values[2].clone()
    assert not same_places(values, places, [0, 2, 3]) and same_places(values, places, [0, 3])
    assert same_places(values, places, [])
