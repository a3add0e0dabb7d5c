"""What a search has chosen, and what is kept of it for the next process."""

import dataclasses

from memopt.passes.chunk_loss import ChunkLoss
from memopt.step.search_result import stored_plan
from tests.step.test_search import make


def test_what_is_kept_is_enough_to_settle_on_the_same():
    plain = make().plan(None).plan.peak_bytes
    found = make().plan(int(0.8 * plain))
    kept = stored_plan(found)
    (choice,) = found.plan.choices
    assert kept.schedules == (choice.plan.schedule,) and kept.peaks == (choice.plan.peak_bytes,)
    assert kept.peak_bytes <= 0.8 * plain and kept.minimum_bytes == found.plan.minimum_bytes
    assert kept.curve == found.plan.curve and kept.lowering == ()
    again = make().from_store(kept, int(0.8 * plain))
    assert stored_plan(again) == kept


def test_rewrites_that_lower_the_floor_are_kept_as_they_are_set():
    usual = ChunkLoss()
    for items in ((usual,), usual.others, (usual.deeper,)):
        found = dataclasses.replace(make().plan(None), lowering=items)
        assert stored_plan(found).lowering == tuple(item.key for item in items) != ()
    assert len({usual.key, usual.others[0].key, usual.deeper.key}) == 3
