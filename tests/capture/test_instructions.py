"""Which of a function's instructions can still run behind a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memopt.capture.instructions import Code


def code_of(function: Callable[..., Any]) -> tuple[Code, int]:
    """With the position of the first call."""
    code = Code.of(function.__code__)
    return code, next(place for place, op in enumerate(code.ops) if op.name == "CALL")


def constants(code: Code, places: set[int]) -> set[Any]:
    return {code.ops[place].value for place in places if code.ops[place].name in ("LOAD_CONST", "RETURN_CONST")}


def branches(first: Any, second: Any) -> Any:
    print()
    if first is None:
        return "none"
    if second.some.thing > 3:
        return "large"
    print()
    return "small" if second.other else "false"


def test_a_branch_that_is_decided_is_not_reached() -> None:
    code, call = code_of(branches)
    by_names = {item.names: item for item in code.conditions(call, ["first", "second"])}
    assert set(by_names) == {("first",), ("second", "some", "thing")}, "something else is called before the third"
    first, large = by_names["first",], by_names["second", "some", "thing"]
    taken: dict[int, bool] = {}
    assert {"none", "large", "small", "false"} <= constants(code, code.behind(call, decided=taken))
    for item, value in ((first, 1), (large, 2)):
        jumps = item.jumps(value)
        assert jumps is not None
        taken[item.place] = jumps
    assert constants(code, code.behind(call, decided=taken)) & {"none", "large", "small", "false"} == {"small", "false"}


def test_what_runs_code_of_a_users_is_not_asked() -> None:
    code, call = code_of(branches)
    first, large = code.conditions(call, ["first", "second"])
    assert first.jumps(object()) is not None and large.jumps(object()) is None and large.jumps("word") is None


def changes(first: Any) -> Any:
    print()
    if first:
        first = None
    return first


def test_a_variable_that_changes_decides_nothing() -> None:
    code, call = code_of(changes)
    assert not list(code.conditions(call, ["first"]))


def handled() -> Any:
    print()
    try:
        return "tried"
    except ValueError:
        return "handled"


def looped() -> Any:
    while "before":
        print()
    return "after"


def test_errors_and_loops_are_followed_until_the_call_is_reached_again() -> None:
    code, call = code_of(handled)
    assert {"tried"} <= constants(code, code.behind(call))
    code, call = code_of(looped)
    assert code.behind(call) and call in code.behind(call) and call + 1 in code.behind(call)
