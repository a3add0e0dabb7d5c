import pytest

from memopt.tensorflow import process
from memopt.tensorflow.process import TensorFlowError, UnsafeModelError, call, require


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder for tasks made here, beside a copy of the worker."""
    (tmp_path / "tasks").mkdir()
    worker = tmp_path / "worker.py"
    worker.write_text(process._WORKER.read_text())
    monkeypatch.setattr(process, "_WORKER", worker)

    def write(name, code):
        (tmp_path / "tasks" / f"{name}.py").write_text(code)

    return write


def test_a_task_answers_without_torch_and_with_what_it_was_asked(tasks, tmp_path):
    tasks(
        "double",
        "import sys\ndef run(request, folder):\n    return {'n': 2 * request['n'], 'torch': 'torch' in sys.modules}",
    )
    assert call("double", {"n": 4}, tmp_path) == {"n": 8, "torch": False}


def test_a_module_of_the_working_folder_is_not_imported(tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("raise SystemExit(3)")
    tasks("plain", "import colorsys\ndef run(request, folder):\n    return {'hue': colorsys.rgb_to_hsv(1, 0, 0)[0]}")
    monkeypatch.setattr(process, "_WORKER", process._WORKER.rename(tmp_path / "tasks" / "worker.py"))
    (tmp_path / "tasks" / "tasks").symlink_to(tmp_path / "tasks")
    assert call("plain", {}, tmp_path) == {"hue": 0.0}


def test_an_error_is_its_first_line(tasks, tmp_path):
    tasks("bad", "def run(request, folder):\n    raise ValueError('no such thing\\nand more')")
    with pytest.raises(TensorFlowError, match=r"\Ano such thing\Z"):
        call("bad", {}, tmp_path)
    tasks("odd", "def run(request, folder):\n    return {}['missing']")
    with pytest.raises(TensorFlowError, match=r"\AKeyError: 'missing'\Z"):
        call("odd", {}, tmp_path)


def test_an_error_may_be_of_a_kind(tasks, tmp_path):
    tasks("kind", "class E(ValueError):\n    kind = 'unsafe'\ndef run(request, folder):\n    raise E('code')")
    with pytest.raises(UnsafeModelError, match="code"):
        call("kind", {}, tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"ended by SIGKILL \(out of memory\?\)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("import os; print('last words', file=sys.stderr, flush=True); os._exit(7)", "ended with code 7: last words"),
    ],
)
def test_a_process_that_dies_is_one_line(tasks, tmp_path, code, expected):
    tasks("dies", f"import sys\ndef run(request, folder):\n    {code}")
    with pytest.raises(TensorFlowError, match=expected):
        call("dies", {}, tmp_path)


def test_a_missing_library_names_the_extra():
    require("json", purpose="counting")
    with pytest.raises(TensorFlowError, match=r"\Acounting needs no_such_library: pip install memopt\[tensorflow\]\Z"):
        require("json", "no_such_library", purpose="counting")
