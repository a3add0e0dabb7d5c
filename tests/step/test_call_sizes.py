"""Which sizes vary, by the calls that were seen."""

import torch

from memopt.step.call_sizes import CallSizes, call_of


def call(*shapes, training=True, **others):
    return call_of(training, [torch.empty(shape) for shape in shapes], others)


def dims(found):
    return None if found is None else sorted(found.dims.values())


def test_what_varies_is_what_other_calls_of_the_form_had_otherwise():
    sizes = CallSizes()
    assert sizes.varying("plan", call((4, 8), (4,))) is None
    assert dims(sizes.varying("plan", call((4, 6), (4,)))) == [(1,)]
    assert sizes.varying("plan", call((4, 8), (4,))) is None  # it has a plan
    assert dims(sizes.varying("another", call((4, 8), (4,)))) == [(1,)]  # not of this kind
    found = sizes.varying("plan", call((3, 5), (3,)))
    assert dims(found) == [(0,), (0, 1)] and found.alike
    assert dims(sizes.varying("plan", call((1, 5), (1,)))) == [(1,)]


def test_other_modes_numbers_and_dtypes_are_other_forms():
    sizes = CallSizes()
    for other in (call((4, 8)), call((4, 6), training=False), call((4, 6), scale=2), call((4, 6), (4, 6))):
        assert sizes.varying("plan", other) is None
    with torch.no_grad():
        assert sizes.varying("plan", call((4, 5))) is None


def test_sizes_that_are_equal_by_chance_are_known():
    sizes = CallSizes()
    sizes.varying("plan", call((4, 8)))
    assert not sizes.varying("plan", call((6, 6))).alike


def test_the_largest_that_each_size_was_is_known():
    sizes = CallSizes()
    sizes.varying("plan", call((4, 8), (4,)))
    sizes.varying("plan", call((9, 6), (9,)))
    assert sizes.varying("plan", call((3, 7), (3,))).largest == {3: 9, 7: 8}
    assert sizes.varying("plan", call((5, 5), (5,))).largest == {5: 9}  # equal by chance


def test_what_is_never_to_have_symbols_is_planned_apart():
    sizes = CallSizes()
    sizes.varying("plan", call((4, 8)))
    sizes.never(call((4, 8)), "a reason")
    assert sizes.varying("plan", call((4, 6))) is None
    assert sizes.apart(call((4, 6))) == 1
    sizes.plan_apart("plan", call((4, 6)))
    assert sizes.apart(call((4, 6))) == 2


class Held:
    """An object that is no container."""

    def __init__(self, *tensors):
        self.layers, self.count = list(tensors), len(tensors)


def test_tensors_in_objects_are_seen_and_numbers_there_are_not():
    sizes = CallSizes()
    first = call((4, 1), cache=Held(torch.empty(4, 2, 7)))
    assert len(first.tensors) == 2
    assert sizes.varying("plan", first) is None
    other = Held(torch.empty(4, 2, 8))
    other.count = 9
    assert dims(sizes.varying("plan", call((4, 1), cache=other))) == [(2,)]


def test_what_is_new_has_the_sizes_of_the_call_before():
    sizes = CallSizes()
    before = call((3, 7))
    sizes.varying("plan", before)
    found = sizes.varying("plan", call((3, 1), cache=Held(torch.empty(3, 2, 7, 5))), after=before.without_tensors())
    assert dims(found) == [(2,)] and found.alike
    assert sizes.varying("plan", call((3, 7), state=Held(torch.empty(3, 5))), after=before) is None  # nothing grows


def test_a_structure_that_holds_itself_ends():
    held = Held(torch.empty(2))
    held.layers.append(held)
    assert len(call((2,), cache=held).tensors) == 2


def test_objects_that_answer_for_themselves_are_not_asked():
    class Proxy:
        def __getattribute__(self, name):
            if name == "__dict__":
                raise RuntimeError("there is nothing behind it")
            return super().__getattribute__(name)

    assert len(call((2,), lazy=Proxy(), words=["word"] * 5000).tensors) == 1
