"""The rooms of CONTRIBUTING.md: those that must not know of others do not, and every folder has its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.own_tests import untested
from tests.private_own import borrowed
from tests.private_torch import nodes_of, own_names, private_uses
from tests.written_outside import Written

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"passes": ROOT / "passes", "backends": ROOT / "backends", "models": ROOT / "models"}
FOLDERS |= {
    path.name: path for path in (ROOT / "memopt").iterdir() if (path / "__init__.py").exists() and not path.is_symlink()
}


def imports(folder: Path) -> Iterator[tuple[str, str]]:
    """Every import of memopt in the folder's files, lazy ones too: the file, and the room or file it is of."""
    for path in sorted(folder.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"memopt.{item.name}" for item in node.names] if node.module == "memopt" else [node.module]
            elif isinstance(node, ast.Import):
                names = [item.name for item in node.names]
            else:
                continue
            for name in names:
                if name.split(".")[0] == "memopt":
                    yield path.name, [*name.split("."), "memopt"][1]


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("solve", {"solve"}),  # plain numbers in and out
        ("models", {"models"}),
        ("patterns", {"patterns", "program", "graph", "torch_compat"}),
        ("xla", {"xla", "program", "graph", "errors", "torch_compat"}),
    ],
)
def test_a_room_that_stands_alone_knows_no_other(room: str, allowed: set[str]) -> None:
    assert {(name, other) for name, other in imports(FOLDERS[room]) if other not in allowed} == set()


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("passes", {"api", "compilation", "calls", "module", "backends", "report", "cli"}),
        ("memory", {"api", "compilation", "calls", "module", "backends", "passes", "step", "report", "cli"}),
        ("report", {"api", "calls", "module", "backends", "passes", "cli"}),
        ("compilation", {"api", "calls", "module", "cli"}),
        ("step", {"api", "calls", "module", "cli"}),
        ("capture", {"api", "calls", "module", "backends", "passes", "cli"}),
        ("common", {"api", "calls", "compilation", "module", "backends", "passes", "step", "report", "program", "cli"}),
        ("graph", {"api", "calls", "compilation", "module", "backends", "passes", "step", "report", "cli"}),
        ("onnx", {"api", "compilation", "calls", "module", "backends", "passes", "convert", "cli"}),
        ("static", {"api", "compilation", "calls", "module", "backends", "report", "cli"}),
        ("onnxruntime", {"api", "compilation", "calls", "module", "backends", "report", "cli"}),
        ("monitoring", {"calls", "compilation", "backends", "passes", "step", "cli"}),
        ("convert", {"api", "compilation", "calls", "module", "backends", "passes", "cli"}),
    ],
)
def test_a_lower_room_knows_no_higher_one(room: str, forbidden: set[str]) -> None:
    assert {(name, other) for name, other in imports(FOLDERS[room]) if other in forbidden} == set()


def test_nothing_but_the_command_line_knows_the_command_line() -> None:
    for room, folder in FOLDERS.items():
        assert room == "cli" or "cli" not in {other for _, other in imports(folder)}


def test_what_a_process_of_its_own_runs_goes_without_memopt() -> None:
    assert list(imports(FOLDERS["tensorflow"] / "tasks")) == []


def test_private_torch_and_unittest_are_named_in_torch_compat_alone() -> None:
    paths = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    paths += (ROOT / "memopt").glob("*.py")
    own = own_names(paths)
    outside = [path for path in paths if path.parent.name != "torch_compat"]
    found = {(str(path.relative_to(ROOT)), use) for path in outside for use in private_uses(path, own)}
    assert found == set()


def test_torch_compat_has_no_unittest_either() -> None:
    paths = list(FOLDERS["torch_compat"].rglob("*.py"))
    own = own_names(paths)
    assert {path.name for path in paths if any(use.startswith("unittest") for use in private_uses(path, own))} == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.fx.experimental.proxy_tensor import make_fx", "torch.fx.experimental.proxy_tensor.make_fx"),
        ("import torch\ntorch._C._cuda_clearCublasWorkspaces()", "torch._C._cuda_clearCublasWorkspaces"),
        ("from torch.nn import functional as F\nF._canonical_mask()", "torch.nn.functional._canonical_mask"),
        ("def f(tensor):\n    return tensor._base", "tensor._base"),
        ("class A:\n    def f(self, x):\n        self._version = 1\n        return x._version", "x._version"),
        ("def f(p):\n    return getattr(p, '_post_accumulate_grad_hooks', None)", "getattr"),
        ("import logging\nlogging.getLogger('torch._dynamo.utils')", "torch._dynamo.utils"),
        ("from unittest import mock", "unittest.mock"),
        ("import torch\naten = torch.ops.aten\naten._softmax.default", None),
        ("import torch\ntorch.ops.aten._to_copy.default", None),
        ("import torch\ntorch._check(True)", None),
        ("class A:\n    def f(self, other):\n        self._mine = 1\n        return other._mine", None),
        ("class A:\n    def f(self):\n        self._version = 1\n        return self._version", None),
        ("def f(pair):\n    return pair._replace(a=1)", None),
    ],
)
def test_what_is_private_of_torch(tmp_path: Path, line: str, found: str | None) -> None:
    path = tmp_path / "file.py"
    path.write_text(line)
    uses = list(private_uses(path, own_names([path])))
    assert (uses == []) if found is None else (len(uses) == 1 and found in uses[0])


def test_a_private_name_is_used_in_its_own_file_alone() -> None:
    paths = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")] + [*(ROOT / "memopt").glob("*.py")]
    paths = [path for path in paths if path.parent.name != "torch_compat"]  # there they are torch's
    assert {(str(path.relative_to(ROOT)), use) for path in paths for use in borrowed(path)} == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from memopt.solve.pack import _least", "memopt.solve.pack._least"),
        ("def f(session):\n    return session._names", "session._names"),
        ("def f(session):\n    session._names = 1", "session._names"),
        ("class A:\n    def f(self, other):\n        self._names = other._names", None),
        ("def f(pair):\n    return pair._replace(a=1)", None),
        ("import torch\ntorch.ops.aten._to_copy.default", None),
    ],
)
def test_what_is_borrowed(tmp_path: Path, line: str, found: str | None) -> None:
    path = tmp_path / "file.py"
    path.write_text(line)
    assert list(borrowed(path)) == ([] if found is None else [found])


# An engine makes these, and they are its own: whoever plans reads them.
WRITTEN_BY_OTHERS = {"PlanRequest"}


def test_no_object_is_written_from_outside_its_own_room() -> None:
    paths = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")] + [*(ROOT / "memopt").glob("*.py")]
    found = {
        (str(path.relative_to(ROOT)), line, written)
        for path, line, written, kind in Written(paths).found()
        if kind not in WRITTEN_BY_OTHERS
    }
    assert found == set()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("def f(session: Session) -> None:\n    session.step = 1", "session.step"),
        ("def f(session: Session | None) -> None:\n    session.step += 1", "session.step"),
        ("def f(session: Any) -> None:\n    session.step, x = 1, 2", "session.step"),
        ("def f():\n    made = Session()\n    made.base = 1", "made.base"),
        ("class A:\n    def __init__(self, given: Session) -> None:\n        self._mine = given\n"
         "    def f(self):\n        self._mine.inner.size = 1", "self._mine.inner.size"),
        ("def f(owner: Owner) -> None:\n    owner.of(1).step = 1", "owner.of(1).step"),
        ("def f(session: Session) -> None:\n    session.goes_back_to(1)\n    session.meta = 1", None),
        ("class Mine(Session):\n    def f(self):\n        self.other = 1", None),
        ("def f(node: Node) -> None:\n    node.step = 1", None),
    ],
)  # fmt: skip
def test_what_is_written_outside(tmp_path: Path, lines: str, found: str | None) -> None:
    for room in "ab":
        (tmp_path / room).mkdir()
    owner = tmp_path / "a" / "owner.py"
    owner.write_text(
        "class Base:\n    base: int\nclass Inner:\n    size: int = 0\n"
        "class Session(Base):\n    def __init__(self):\n        self.step = 0\n        self.inner = Inner()\n"
        "class Owner:\n    def of(self, place) -> Session: ...\n"
    )
    (tmp_path / "b" / "other.py").write_text(lines)
    written = [text for _, _, text, _ in Written([owner, tmp_path / "b" / "other.py"]).found()]
    assert written == ([] if found is None else [found])


def test_every_folder_has_its_row() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room in FOLDERS:
        row = f"| `{room}/` (as `memopt.{room}`)" if room in ("passes", "backends", "models") else f"| `memopt/{room}/`"
        assert row in text, room


def test_every_file_that_lies_in_no_folder_has_its_row() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = {path.name for path in (ROOT / "memopt").glob("*.py") if not path.name.startswith("__")}
    assert {name for name in files if f"`memopt/{name}`" not in text} == set()


def test_the_page_on_architecture_names_files_that_are_there() -> None:
    named = re.findall(r"`([a-z0-9_/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert (
        named
        and [name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "memopt"))] == []
    )


def test_no_file_is_longer_than_400_lines() -> None:
    folders = [*FOLDERS.values(), ROOT / "tests", ROOT / "benchmarks", ROOT / "examples"]
    paths = {path for folder in folders for path in folder.rglob("*.py")} | {*(ROOT / "memopt").glob("*.py")}
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = ast.literal_eval(text[text.index("packages = [") :].partition("= ")[2].partition("\n]")[0] + "]")
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "memopt").rglob("__init__.py")}
    found |= {f"memopt.{room}" for room in ("passes", "backends", "models")}
    assert sorted(found) == sorted(named)


def test_each_module_has_a_test_of_its_name() -> None:
    modules = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")] + [*(ROOT / "memopt").glob("*.py")]
    assert list(untested((path for path in modules if not path.name.startswith("__")), ROOT / "tests")) == []


def test_a_module_without_a_test_of_its_name_is_found(tmp_path: Path) -> None:
    for name in ("test_b.py", "test_old_c.py", "test_d_cases.py", "test_edges.py"):
        (tmp_path / name).write_text("from memopt.room import e\n")
    modules = [Path(f"room/{name}.py") for name in "abcde"]
    assert list(untested(modules, tmp_path)) == [modules[0], modules[4]]
