"""What tells the code of a step from other code, and that a step which is only looked for is not lowered."""

from types import SimpleNamespace

import pytest

from memopt.inductor import recalled
from memopt.inductor.joint_cache import AbsentError
from memopt.inductor.recalled import digest_of


def code(source):
    return SimpleNamespace(wrapper=None if source is None else SimpleNamespace(source=source))


def test_a_digest_is_of_both_graphs_and_of_where_one_ends():
    known = digest_of(code("ab"), code("c"))
    assert known == digest_of(code("ab"), code("c"))
    assert len({known, digest_of(code("a"), code("bc")), digest_of(code("c"), code("ab"))}) == 3


@pytest.mark.parametrize(
    "graphs", [(None, code("a")), (code("a"), None), (code(None), code("a")), (code("a"), code(None))]
)
def test_without_code_there_is_no_digest(graphs):
    assert digest_of(*graphs) == ""


def test_code_that_the_cache_does_not_have_is_none(monkeypatch):
    asked = []

    def absent(*args, cached):
        asked.append(cached)
        raise AbsentError

    monkeypatch.setattr(recalled, "compile_training", absent)
    cache = SimpleNamespace(looking=lambda forward, backward: (forward, backward))
    hooks = SimpleNamespace(backward=lambda run: run)
    assert recalled.recalled(None, [], hooks, cache, b"facts") is None
    assert len(asked) == 1


def test_a_step_that_is_only_looked_for_is_never_lowered():
    with pytest.raises(AssertionError, match="neither cut nor lowered"):
        recalled._untraced(1, more=2)
