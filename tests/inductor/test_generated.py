"""A graph's generated code, and both graphs' as a step that may be captured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memopt.cuda_graphs.signature import StepSignature
from memopt.inductor.generated import GeneratedCode, cuda_graph_step, overwritten_arguments
from memopt.inductor.replay import Wrapper

SIGNATURE = StepSignature(frozenset({0}), 1, 1)


def taken(path, call, around=lambda call: call):
    """Code whose module has this function, what Inductor is given for it, and how often it was loaded."""
    path.write_text("code = 1")
    code, loads = GeneratedCode(around), []

    def load():
        loads.append(path)
        return SimpleNamespace(call=call)

    return code, code.defer(load, str(path), {"constant": 3}), loads


def test_it_is_known_at_once_and_loaded_when_it_runs(tmp_path):
    code, module, loads = taken(tmp_path / "graph.py", sum)
    assert code.wrapper == Wrapper("code = 1", {"constant": 3}) and not loads
    assert module.call([1, 2]) == 3 and module.call([3, 4]) == 7
    code.load()
    assert len(loads) == 1


def test_what_is_put_around_it_is_around_what_runs_instead_too(tmp_path):
    code, module, _ = taken(tmp_path / "graph.py", sum, lambda call: lambda args: -call(args))
    assert module.call([1, 2]) == -3
    code.instead = max
    assert module.call([1, 2]) == -2


def test_before_there_is_code_nothing_is_recordable(tmp_path):
    code, _, _ = taken(tmp_path / "graph.py", sum)
    assert GeneratedCode().load() is None
    assert cuda_graph_step(code, GeneratedCode(), SIGNATURE, SimpleNamespace()) is None
    assert cuda_graph_step(GeneratedCode(), code, SIGNATURE, SimpleNamespace()) is None


def test_graphs_run_by_the_step_that_may_be_captured(tmp_path):
    first, forward, _ = taken(tmp_path / "first.py", lambda args: [sum(args)])
    second = taken(tmp_path / "second.py", lambda args: [max(args)])[0]
    step = cuda_graph_step(first, second, SIGNATURE, SimpleNamespace(busy=True))
    assert step is not None and step.signature is SIGNATURE
    assert first.instead == step.forward and second.instead == step.backward
    assert forward.call([1, 2]) == [3]
    assert step.steered is None  # this code has no lines to be told


@pytest.mark.parametrize("graph", [0, 1])
def test_code_that_cannot_be_loaded_says_so_when_it_is_to_run(tmp_path, graph):
    def broken():
        raise OSError("a kernel is lost")

    codes = [taken(tmp_path / f"{index}.py", sum)[0] for index in range(2)]
    (tmp_path / "lost.py").write_text("")
    codes[graph].defer(broken, str(tmp_path / "lost.py"), {})
    with pytest.raises(OSError, match="a kernel is lost"):
        cuda_graph_step(*codes, SIGNATURE, SimpleNamespace())


CODE = """def call(args):
    a_1, b, c, tangents_1 = args
    args.clear()
    buf0 = c; del c  # reuse
    buf1 = reinterpret_tensor(a_1, (4, ), (1, ), 0); del a_1  # reuse
    del b
"""


def test_arguments_whose_memory_code_uses_are_known_by_its_lines():
    assert overwritten_arguments(CODE) == (0, 2)
    assert overwritten_arguments(CODE.replace("  # reuse", "")) == ()
    assert overwritten_arguments("def call(args): ...") is None
