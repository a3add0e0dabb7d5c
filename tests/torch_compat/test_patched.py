from __future__ import annotations

import types

import pytest

from memopt.torch_compat.patched import replaced


class Parent:
    inherited = 1

    @staticmethod
    def made() -> int:
        return 1


class Child(Parent):
    own = 2


def test_what_was_there_is_there_again_after_an_error() -> None:
    room = types.ModuleType("room")
    vars(room)["name"] = 1
    with pytest.raises(ValueError, match="within"), replaced(room, "name", 2):
        assert vars(room)["name"] == 2
        raise ValueError("within")
    assert vars(room)["name"] == 1


def test_blocks_lie_within_one_another() -> None:
    with replaced(Child, "own", 3):
        with replaced(Child, "own", 4):
            assert Child.own == 4
        assert Child.own == 3
    assert Child.own == 2


def test_what_is_inherited_is_not_copied_down() -> None:
    with replaced(Child, "inherited", 5):
        assert (Child.inherited, Parent.inherited) == (5, 1)
    assert "inherited" not in vars(Child) and Child.inherited == 1


def test_a_static_method_stays_one() -> None:
    with replaced(Parent, "made", staticmethod(lambda: 2)):
        assert Parent().made() == 2
    assert isinstance(vars(Parent)["made"], staticmethod) and Parent().made() == 1


def test_what_is_not_there_is_not_made() -> None:
    with pytest.raises(AttributeError), replaced(Child, "absent", 1):
        pass
    assert not hasattr(Child, "absent")


@pytest.mark.parametrize("first_ends", [0, 1, 2])
def test_blocks_of_several_threads_end_in_any_order(first_ends: int) -> None:
    blocks = [replaced(Child, "own", number) for number in (10, 11, 12)]
    for block in blocks:
        block.__enter__()
    left = [10, 11, 12]
    for number in (first_ends, *(other for other in (0, 1, 2) if other != first_ends)):
        blocks[number].__exit__(None, None, None)
        left.remove(10 + number)
        assert Child.own == (left[-1] if left else 2)
