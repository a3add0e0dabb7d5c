"""Generated code that says which line comes next."""

from __future__ import annotations

import sys
import types

from memopt.inductor.lines import with_lines

METHOD = """
import sys
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        x, = args
        args.clear()
        with guard(0):
            assert_size_stride(x, (4,), (1,))
            buf0 = empty(4)
            kernel.run(x, buf0)
            buf1 = reinterpret_tensor(buf0, (2, 2)); del buf0
            extern_kernels.mm(buf1, buf1, out=buf1)
            stream0 = get_raw_stream(0)
            buf2 = extern_kernels.conv(buf1)
        return (buf2, )
runner = Runner(partitions=[])
call = runner.call
"""


class _Anything:
    def __getattr__(self, name):
        return lambda *args, **kwargs: (name, args)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def made(source):
    module = types.ModuleType("generated")
    module.__file__ = "generated.py"
    names = ("assert_size_stride", "reinterpret_tensor", "get_raw_stream", "empty")
    module.__dict__.update({name: lambda *args: args for name in names})
    module.__dict__.update(guard=lambda index: _Anything(), kernel=_Anything(), extern_kernels=_Anything())
    exec(source, module.__dict__)
    return module


def test_lines_that_may_take_memory_are_told_in_order():
    told = []
    module = made(METHOD)
    call, following = with_lines(METHOD, module, told.append, first=5)
    given = [1]
    assert call(given) == module.call([1]) and given == []
    assert told == [5, 6, 7] and following == 8  # the buffer, the product, the convolution


def test_code_that_is_a_function_tells_its_lines_too():
    told = []
    source = "def call(args):\n    buf0 = empty(args)\n    return buf0\n"
    call, following = with_lines(source, made(source), told.append)
    assert call([1]) == ([1],) and told == [0] and following == 1


def test_a_module_without_a_call_tells_nothing():
    assert with_lines("x = 1\n", sys.modules[__name__], print) is None
