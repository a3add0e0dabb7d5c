"""Wrappers run on fake tensors: what is allocated, reused and freed is counted, kernels left out."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.inductor.replay import Meter, ReplayError, Wrapper, replay

KIB = 256  # float32 elements
HEAD = """
import torch
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
cpp_fused = async_compile.cpp('''this is no code: a replay must not compile it''')
async_compile.wait(globals())
"""


def run(body, *sizes, workspace=None, attributes=None, count_inputs=True):
    """Replay `call`, whose body is given; returns results and meter."""
    mode = FakeTensorMode()
    with mode:
        arguments = [torch.empty(size) for size in sizes]
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    names = ", ".join(f"x{index}" for index in range(len(sizes)))
    unpack = f"    {names}, = args\n" if sizes else ""
    source = f"{HEAD}\ndef call(args):\n{unpack}    args.clear()\n{lines}"
    meter = Meter(workspace)
    (meter.add if count_inputs else meter.ignore)(arguments)
    results = replay(Wrapper(source, attributes or {}), arguments, mode, meter)
    assert arguments == []
    return results, meter


def test_buffers_count_from_their_making_until_they_are_deleted():
    results, meter = run(
        """
a = empty_strided_cpu((2, 256), (256, 1), torch.float32)
b = empty_strided_cpu((1, 256), (256, 1), torch.float32)
del a
c = empty_strided_cpu((256,), (1,), torch.float32)
cpp_fused(b, c)
del b
return (c,)
"""
    )
    assert (meter.live, meter.peak) == (1024, 3 * 1024)
    assert tuple(results[0].shape) == (256,) and results[0].fake_mode is not None


def test_a_buffer_that_is_reused_counts_once():
    results, meter = run(
        """
a = empty_strided_cpu((256,), (1,), torch.float32)
b = reinterpret_tensor(a, (16, 8), (16, 1), 8); del a
cpp_fused.run(b)
return (b,)
"""
    )
    assert (meter.live, meter.peak) == (1024, 1024)
    assert (tuple(results[0].shape), results[0].stride(), results[0].storage_offset()) == ((16, 8), (16, 1), 8)


def test_inputs_die_with_their_last_reader_unless_they_are_resident():
    body = """
y = empty_strided_cpu((256,), (1,), torch.float32)
del x0
z = empty_strided_cpu((256,), (1,), torch.float32)
del y
return (z,)
"""
    assert run(body, KIB)[1].peak == 2 * 1024
    result, held = run(body, KIB, count_inputs=False)
    assert (held.live, held.peak, len(result)) == (1024, 2 * 1024, 1)


def test_an_input_that_is_checked_for_how_it_lies_is_taken_as_it_is(monkeypatch):
    """Torch's own check reads addresses, which fake tensors have none of: the process ended there."""
    own = "def copy_if_misaligned(tensor):\n    raise SystemExit\n"
    monkeypatch.setattr(sys.modules[__name__], "HEAD", HEAD + own)
    (result,), meter = run("x0 = copy_if_misaligned(x0)\nreturn (x0,)", KIB)
    assert (meter.live, meter.peak) == (1024, 1024) and result.shape == (KIB,)


def test_library_calls_take_their_workspace_while_they_run():
    asked = []

    def workspace(func, args, kwargs, result):
        asked.append((func, tuple(result.shape)) if isinstance(result, torch.Tensor) else func)
        return 5000 if func is torch.ops.aten.mm.default else 0

    body = """
y = empty_strided_cpu((16, 16), (16, 1), torch.float32)
extern_kernels.mm(x0, x0, out=y)
return (y,)
"""
    _, meter = run(body, (16, 16), workspace=workspace)
    assert (torch.ops.aten.mm.default, (16, 16)) in asked
    assert (meter.live, meter.peak) == (1024, 2 * 1024 + 5000)


def test_workspace_that_is_told_later_counts_with_what_was_alive_at_its_call():
    def workspace(func, args, kwargs, result):
        return (lambda: told.append(func) or 5000) if func is torch.ops.aten.mm.default else 0

    told = []
    body = """
y = empty_strided_cpu((16, 16), (16, 1), torch.float32)
extern_kernels.mm(x0, x0, out=y)
del x0
z = empty_strided_cpu((16, 16), (16, 1), torch.float32)
return (y, z)
"""
    _, meter = run(body, (16, 16), workspace=workspace)
    assert told == []
    assert meter.peak == 2 * 1024 + 5000 and meter.peak == 2 * 1024 + 5000 and len(told) == 1
    _, forgotten = run(body, (16, 16), workspace=workspace)
    forgotten.mark()
    assert forgotten.peak == forgotten.live == 2 * 1024 and len(told) == 1


def test_library_calls_without_out_make_their_result():
    results, meter = run("return (extern_kernels.mm(x0, x0),)", (16, 16))
    assert tuple(results[0].shape) == (16, 16) and meter.peak == 2 * 1024


def test_constants_of_the_graph_are_in_the_namespace():
    assert run("return (size,)", attributes={"size": 7})[0] == [7]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return (extern_kernels.no_such_call(x0),)", "ReplayError: extern kernel no_such_call is not known"),
        ("return (unheard_of(x0),)", r"NameError: name 'unheard_of' is not defined"),
    ],
)
def test_what_is_not_understood_is_named_in_one_line(body, words):
    with pytest.raises(ReplayError, match=rf"^Inductor's code cannot be followed \({words}\)$"):
        run(body, KIB)


def test_a_peak_is_counted_from_the_mark():
    mode, meter = FakeTensorMode(), Meter()
    with mode, meter:
        kept, large = torch.empty(KIB), torch.empty(8 * KIB)
        del large
        assert (meter.live, meter.peak) == (1024, 9 * 1024)
        meter.mark()
        assert meter.peak == 1024
        more = kept + 1
    assert meter.peak == meter.live == 2 * 1024
    del kept, more
    assert meter.live == 0
