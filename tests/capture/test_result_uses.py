"""What the bytecode of a function proves of the result of a call in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.capture import caller
from memopt.capture.result_uses import ATTRIBUTE, FIRST, KEY, OR, taken


class Result:
    loss, logits = 1, 2

    def __getitem__(self, key: Any) -> int:
        return 1


def call(*args: Any, **kwargs: Any) -> Result:
    frame = sys._getframe(1)
    found.append(bool(caller._site(caller._sites(frame), frame).use))
    return Result()


found: list[bool] = []


def attribute() -> Any:
    return call(x=1).loss


def key() -> Any:
    return call()["loss"] * 2


def first() -> Any:
    return call(*[])[0]


def variable() -> Any:
    out = call(**{})
    loss = out.loss
    return loss


def in_a_block() -> Any:
    with torch.no_grad():
        out = call(**{"a": 1})
        loss = out["loss"] * 2
    del out
    return loss


def twice() -> Any:
    out = call()
    one, other = out.loss, out.loss
    return one, other


def another_attribute() -> Any:
    return call().logits


def another_place() -> Any:
    return call()[1]


def also_later() -> Any:
    out = call()
    loss = out.loss
    return loss + out.logits


def passed_on() -> Any:
    out = call()
    str(out.loss)
    return out


def in_a_closure() -> Any:
    out = call()
    return lambda: out.loss


def a_method() -> Any:
    return getattr(call(), "loss")  # noqa: B009 - another name might stand there


def by_class() -> Any:
    out = call()
    return out["loss"] if isinstance(out, dict) else out[0]


def with_key() -> Any:
    out = call()
    if isinstance(out, dict) and "loss" not in out:
        raise ValueError(f"no loss in {','.join(out.keys())}")
    return out["loss"]


def returned_on_demand(wanted: bool = False) -> Any:
    out = call()
    loss = out.loss
    return (loss, out) if wanted else loss


class Settings:
    past, every = -1, 100


class Looper:
    function: Any = None

    def __init__(self) -> None:
        self.settings = Settings()

    def by_attributes(self, labels: Any = None) -> Any:
        """As transformers' Trainer: what is asked before anything else is called."""
        out = call()
        if self.settings.past >= 0:
            return out.logits
        if self.function is not None:
            loss = self.function(out)
        elif labels is not None:
            loss = str(out)
        else:
            loss = out.loss
        return loss

    def eval(self) -> None:
        pass

    def also_evaluates(self) -> Any:
        out = call()
        loss = out.loss
        self.eval()
        return loss

    def in_a_loop(self) -> Any:
        for _ in range(2):
            out = call()
            loss = out.loss
        return loss


_LOOPER = Looper()
TAKES_LOSS = [attribute, key, first, variable, in_a_block, twice, by_class, with_key, returned_on_demand]
TAKES_LOSS += [_LOOPER.by_attributes, _LOOPER.in_a_loop, _LOOPER.also_evaluates]


@pytest.mark.parametrize("function", TAKES_LOSS)
def test_a_loss_that_is_all_that_is_taken(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert set(found) == {True}


def stored_anew(wanted: bool = False) -> Any:
    out = call()
    wanted = bool(out.loss)
    return out if wanted else out.loss


def later_in_a_loop() -> Any:
    out = None
    for _ in range(2):
        if out is not None:
            print(out.logits)
        out = call()
        print(out.loss)
    return None


def on_error() -> Any:
    out = call()
    try:
        return out.loss
    except ValueError:
        return out


class Changes(Looper):
    def wanted(self) -> None:
        self.settings.past = 1

    def after_another_call(self) -> Any:
        out = call()
        self.wanted()
        if self.settings.past >= 0:
            return out.logits
        return out.loss

    @property
    def computed(self) -> bool:
        return True

    def by_a_property(self) -> Any:
        out = call()
        return out.logits if self.computed else out.loss

    def given_to_itself(self) -> Any:
        out = call()
        for _ in range(2):
            out = call(out)
        return out.loss

    def in_between(self) -> Any:
        out = call()
        self.settings.past += 1
        return out.logits if self.settings.past >= 0 else out.loss

    def in_pieces(self) -> Any:
        out = call()
        yield out.loss
        if self.settings.past >= 0:
            yield out.logits

    def of_a_module(self) -> Any:
        return counted(torch.nn.Identity())


def counted(module: torch.nn.Module) -> Any:
    out = call()
    return out.logits if module.training else out.loss


_CHANGES = Changes()
TAKES_MORE = [another_attribute, another_place, also_later, passed_on, in_a_closure, a_method, stored_anew]
TAKES_MORE += [later_in_a_loop, on_error, lambda: returned_on_demand(True), lambda: Looper().by_attributes("some")]
TAKES_MORE += [_CHANGES.after_another_call, _CHANGES.by_a_property, _CHANGES.given_to_itself]
TAKES_MORE += [_CHANGES.in_between, lambda: next(_CHANGES.in_pieces()), _CHANGES.of_a_module]


@pytest.mark.parametrize("function", TAKES_MORE)
def test_more_may_be_taken(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert not found[0]


SCRIPT = """
from tests.capture.test_result_uses import call, found

class Averages:
    def add(self, loss):
        {inside}

for _ in range(2):
    out = call()
    loss = out.loss
    Averages().add(loss)
{behind}
print(found)
"""


SCRIPTS = {
    ("pass", "del out"): True,
    ("pass", "print(out.logits)"): False,
    ("return out", ""): False,
    ("pass", "found.append(len(globals()) < 0)"): False,
    ("self.eval = None", ""): True,
}

# Each in a copy of a process that has imported what they import, and, as Python runs a script, with no frame below it:
# so functions are called that are registered for the process's end.
RUN_ALL = """
import atexit, os, sys
import tests.capture.test_result_uses

for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.stdout = open(path + ".out", "w")
        atexit.register(exec, compile(open(path).read(), path, "exec"), {"__name__": "__main__", "__file__": path})
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, path
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What each of the scripts has printed."""
    folder, root = tmp_path_factory.mktemp("scripts"), str(Path(__file__).parents[2])
    paths = {case: folder / f"train_{number}.py" for number, case in enumerate(SCRIPTS)}
    for (inside, behind), path in paths.items():
        path.write_text(SCRIPT.format(inside=inside, behind=behind))
    subprocess.run([sys.executable, "-c", RUN_ALL, *paths.values()], check=True, env={**os.environ, "PYTHONPATH": root})
    return {case: path.with_name(f"{path.name}.out").read_text() for case, path in paths.items()}


@pytest.mark.parametrize("case", SCRIPTS, ids="-".join)
def test_variables_of_a_script_are_its_own(case: tuple[str, str], printed: dict[tuple[str, str], str]) -> None:
    assert (str(SCRIPTS[case]) in printed[case]) and (str(not SCRIPTS[case]) not in printed[case])


def test_variables_of_a_prompt_may_be_read_by_its_next_lines() -> None:
    script = "from tests.capture.test_result_uses import call, found\nout = call()\nloss = out.loss\nprint(found)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == str([False])


def reads_all() -> Any:
    out = call()
    loss = out.loss
    return loss, locals()["out"]


def evaluates() -> Any:
    out = call()
    loss = out.loss
    return loss, eval("out")


def debugs() -> Any:
    out = call()
    loss = out.loss
    if found is None:
        import pdb

        pdb.set_trace()
    return loss


@pytest.mark.parametrize("function", [reads_all, evaluates, debugs])
def test_variables_that_are_read_by_name_may_be_any(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert found == [False]


def test_what_is_taken_in_several_ways_is_one_thing() -> None:
    class Both(dict[Any, Any]):
        loss = 1

    both = Both({"loss": 1, 0: 1})
    assert taken(both, KEY) == taken(both, OR.join([KEY, FIRST, ATTRIBUTE])) == 1
    assert taken([3], KEY + OR + FIRST) == 3 and taken([3], KEY) is None
    assert taken(Both({"loss": 1, 0: 2}), KEY + OR + FIRST) is None
