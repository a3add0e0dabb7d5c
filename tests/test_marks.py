"""The marks by which `make test` and `make test-slow` share the tests."""

from __future__ import annotations

import pytest

from tests.conftest import _known, pytest_itemcollected

NAMES = ["test_a[aten-0.5]", "test_a[aten-None]", "test_a[inductor-0.5]", "test_b"]


class Item:
    """As much of one of pytest's items as the marks need."""

    def __init__(self, name, *cases):
        self.name, self.nodeid, self.marks = name, f"tests/test_x.py::{name}", []
        if cases:
            self.marks.append(pytest.mark.quick(*cases).mark)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)


@pytest.mark.parametrize(
    ("cases", "long"),
    [(["aten-*"], ["inductor-0.5"]), (["inductor-0.5"], ["aten-0.5", "aten-None"]), ([], [])],
)
def test_cases_that_quick_does_not_name_are_long(cases, long):
    items = [Item(name, *cases) for name in NAMES[:3]]
    for item in items:
        pytest_itemcollected(item)
    assert [item.name for item in items if item.get_closest_marker("long")] == [f"test_a[{case}]" for case in long]


def test_a_name_that_no_case_has_is_refused():
    _known([Item(name, "aten-*", "inductor-0.5") for name in NAMES[:3]] + [Item("test_b")])
    with pytest.raises(pytest.UsageError, match="no case is called 'static-"):
        _known([Item(name, "aten-*", "static-0.5") for name in NAMES[:3]])
