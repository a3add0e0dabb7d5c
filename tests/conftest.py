"""One thread, one seed and an own cache: results must not depend on cores, the order of tests, or a user's files."""

import fnmatch
import gc
import os
import shutil
import types
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch._dynamo.guards
from torch._logging._internal import trace_log

from memopt.common import garbage
from memopt.step import script_store, warm_start
from memopt.step.observed_steps import Looking
from tests.planning import alone, brief_searches, costs_by_figures

# No time limit for an example, as machines are busy, and the same examples every time: what fails is found again.
hypothesis.settings.register_profile("memopt", deadline=None, derandomize=True)
hypothesis.settings.load_profile("memopt")


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("MEMOPT_CACHE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What g++ compiles for one test of a run, it compiles for none of the others: see compiler/g++."""
    found = shutil.which("g++")
    if found is None or "CXX" in os.environ:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"  # of all workers of this run
    kept.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_GXX", found)
        patch.setenv("TESTS_KERNELS", str(kept))
        patch.setenv("PATH", str(Path(__file__).with_name("compiler")), prepend=os.pathsep)
        yield


@pytest.fixture
def own_patch() -> Iterator[pytest.MonkeyPatch]:
    """For fixtures: a test that undoes its own changes keeps theirs."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing is compiled before a test or after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count compilations: nothing that another one has made is found."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _own_steps(request: pytest.FixtureRequest, own_patch: pytest.MonkeyPatch) -> None:
    """A step that another test has finished is not loaded: what is asked is how it is made."""
    own_patch.setattr(warm_start, "versions", lambda: request.node.nodeid)
    own_patch.setattr(script_store, "versions", lambda: request.node.nodeid)


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, own_patch: pytest.MonkeyPatch) -> None:
    """A test's budget is of its model's steps: the copies to compare with, and what other tests keep, are not in it.

    Tests of what the process holds beside a step say so: `whole_process`.
    """
    if not request.node.get_closest_marker("whole_process"):
        alone(own_patch)


@pytest.fixture(autouse=True)
def _brief_searches(request: pytest.FixtureRequest, own_patch: pytest.MonkeyPatch) -> None:
    """A step must stay inside whatever plan was found: how good the plan is, tests/solve asks, and the slow tests."""
    if not request.node.get_closest_marker("slow"):
        brief_searches(own_patch)


@pytest.fixture(autouse=True)
def _costs_by_figures(request: pytest.FixtureRequest, own_patch: pytest.MonkeyPatch) -> None:
    """On a CPU the times by which steps are planned come of figures: a noisy clock would choose another plan.

    The folder tests/memory/cost, which is about the clock, does without this.
    """
    if not any(map(request.node.get_closest_marker, ("slow", "gpu"))):
        costs_by_figures(own_patch)


@pytest.fixture(autouse=True)
def _looks_by_steps(request: pytest.FixtureRequest, own_patch: pytest.MonkeyPatch) -> None:
    """Which steps are observed does not depend on how long looking takes; its own tests have a clock of their own."""
    if request.path.name != "test_observed_steps.py":
        own_patch.setattr(Looking, "_is_small", lambda self: True)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of a whole module are made before those above: they plan as the test does for which they are made."""
    item = request._pyfuncitem
    with pytest.MonkeyPatch.context() as patch:
        if fixturedef.scope != "function" and not any(map(item.get_closest_marker, ("slow", "gpu"))):
            brief_searches(patch)
            costs_by_figures(patch)
        return (yield)


@pytest.fixture(autouse=True)
def _short_collections() -> None:
    """Leave what imports and earlier tests keep out of collections of garbage: every measured step does one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _seeds_untraced() -> Iterator[None]:
    """Torch writes down the stack at each seed, once for each kind of device that is not in use: 2 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(module, "traceback", types.SimpleNamespace(format_stack=list))
        yield


@pytest.fixture(scope="session", autouse=True)
def _guards_untimed() -> Iterator[None]:
    """Dynamo flushes the processor's caches to time each graph's guards, for its log alone: 20 ms a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *args: 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _traces_unread() -> Iterator[None]:
    """Torch prints graphs, code and stacks for its structured trace where anyone listens; pytest does, no user does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_log, "handlers", [])
        patch.setattr(trace_log, "addHandler", lambda handler: None)  # before each phase of each test
        yield


@pytest.fixture(scope="session", autouse=True)
def _frozen_is_known() -> Iterator[None]:
    """Do not count what is frozen at every plan: all that a run keeps by and by, a tenth of a second and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "_frozen_by_the_caller", lambda: True)
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases that `quick` does not name as `long`."""
    quick = item.get_closest_marker("quick")
    if quick is not None and not any(fnmatch.fnmatchcase(_case(item), name) for name in quick.args):
        item.add_marker("long")


def _case(item: pytest.Item) -> str:
    """What stands between the brackets of the test's name."""
    return item.name.partition("[")[2][:-1]


def _known(items: list[pytest.Item]) -> None:
    """Refuse names in `quick` that no case has: none of them would be quick."""
    cases: dict[str, list[str]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(_case(item))
    for item in items:
        quick = item.get_closest_marker("quick")
        for name in quick.args if quick is not None else ():
            if not fnmatch.filter(cases[item.nodeid.partition("[")[0]], name):
                raise pytest.UsageError(f"{item.nodeid}: no case is called {name!r}, which `quick` names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if not any("::" in argument for argument in config.args):
        _known(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
