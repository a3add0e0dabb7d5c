"""What is installed is what is in the tree, and what is public is public on purpose."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memopt

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


def folder_of(package: str) -> Path:
    """Where pyproject.toml says that the package's files lie."""
    parent = package
    while parent not in FOLDERS:
        parent = parent.rpartition(".")[0]
    return ROOT / FOLDERS[parent] / package.removeprefix(parent).replace(".", "/").lstrip("/")


def packages_on_disk() -> set[str]:
    found = set()
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT / folder)
            found.add(".".join((name, *relative.parts)))
    return found


def test_packages_are_those_on_disk():
    declared = PROJECT["tool"]["setuptools"]["packages"]
    assert len(declared) == len(set(declared))
    assert set(declared) == packages_on_disk()


@pytest.mark.parametrize("name", ["passes", "backends", "models"])
def test_rooms_at_the_top_are_linked_into_the_package(name):
    link = ROOT / "memopt" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree, so that no build folder is left in it; nothing is downloaded."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("memopt", "passes", "backends", "models"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("memopt-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_file_of_every_package(wheel):
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in PROJECT["tool"]["setuptools"]["packages"]
        for path in folder_of(package).glob("*.py")
    }
    data = {"memopt/py.typed", "memopt/static/table.json"}
    data |= {f"memopt/report/page/{path.name}" for path in (ROOT / "memopt/report/page").iterdir()}
    assert expected | data == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_wheel_names_its_license_and_entry_points(wheel):
    (license_file,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "memopt = memopt.cli:main" in wheel.read(entry_points).decode()


def test_the_citation_is_of_this_version():
    lines = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if ": " in line and line[0] != " "
    )
    assert lines["version"] == PROJECT["project"]["version"] == importlib.metadata.version("memopt")
    assert lines["license"] == PROJECT["project"]["license"] and lines["cff-version"] == "1.2.0"


@pytest.mark.parametrize("group", ["console_scripts", "torch_dynamo_backends"])
def test_installed_entry_points_load(group):
    (entry,) = [entry for entry in importlib.metadata.entry_points(group=group) if entry.name == "memopt"]
    assert callable(entry.load())


def test_constraints_pin_every_direct_dependency_of_make_test():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["hf"]]
    names = {item.split(">")[0].split("=")[0].lower() for item in wanted}
    assert names <= pinned


def test_every_package_imports_under_its_one_name():
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        module = importlib.import_module(package)
        assert Path(module.__file__).resolve().parent == folder_of(package).resolve()
        other = sys.modules.get(package.removeprefix("memopt."))  # the onnx package has that name by right
        assert package == "memopt" or other is None or other.__file__ != module.__file__


def test_public_surface_is_frozen():
    """A name joins or leaves this list on purpose, or not at all."""
    assert sorted(memopt.__all__) == [
        "BudgetError",
        "CaptureError",
        "Change",
        "Comparison",
        "CompiledModule",
        "INFERENCE",
        "Measurement",
        "MemoryBreakdown",
        "Monitor",
        "Pass",
        "PassError",
        "PassManager",
        "PassResult",
        "Program",
        "Refusal",
        "Report",
        "TRAINING",
        "compare",
        "compile",
        "estimate",
        "export",
        "export_tensorflow",
        "measure",
        "models",
        "monitor",
        "plan",
    ]
    for name in memopt.__all__:
        assert getattr(memopt, name) is not None


def test_neither_the_package_nor_its_help_imports_torch_and_its_calls_nothing_that_only_some_need():
    code = (
        "import sys, memopt, memopt.cli, click.testing; "
        "shown = click.testing.CliRunner().invoke(memopt.cli.main, ['--help']); "
        "print(shown.exit_code, 'torch' in sys.modules, memopt.compile.__name__, 'torch' in sys.modules); "
        "print([name for name in ('transformers', 'onnx', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 False compile True", "[]"]


@pytest.mark.quick("memopt.compilation.layout")
@pytest.mark.parametrize(
    "first", ["memopt.passes.offload", "memopt.patterns.batch_gradients", "memopt.compilation.layout"]
)
def test_a_module_may_be_the_first_that_is_imported(first):
    subprocess.run([sys.executable, "-c", f"import {first}"], capture_output=True, check=True)


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'memopt' has no attribute 'compiled'"):
        _ = memopt.compiled
    assert set(memopt.__all__) <= set(dir(memopt))
