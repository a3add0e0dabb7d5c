"""The search that is kept between two attempts to plan a step."""

from types import SimpleNamespace

from memopt.compilation.kept_search import KeptSearch


def search(name):
    return SimpleNamespace(name=name, lowerings=lambda limit: [(name, limit)], all_lowering=lambda: (name,))


def test_a_search_is_made_once_for_a_step_and_kept_in_place_of_another_step_s():
    kept, made = KeptSearch(), []

    def make(name):
        made.append(name)
        return search(name)

    first = kept.of(("a",), lambda: make("first"))
    assert kept.of(("a",), lambda: make("again")) is first
    assert kept.of(("b",), lambda: make("second")).name == "second"
    assert kept.of(("a",), lambda: make("third")).name == "third"
    assert made == ["first", "second", "third"]


def test_without_a_search_there_is_nothing_to_lower_the_floor_with():
    kept = KeptSearch()
    assert kept.lowerings(5) == [] and kept.all_lowering() == ()
    kept.of(("a",), lambda: search("first"))
    assert kept.lowerings(5) == [("first", 5)] and kept.all_lowering() == ("first",)
    kept.forget()
    assert kept.lowerings(5) == [] and kept.all_lowering() == ()
