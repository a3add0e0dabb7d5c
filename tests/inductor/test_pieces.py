"""Generated code that gives gradients as it goes: where each is given, and which stay to the end."""

import types

import pytest

from memopt.inductor.pieces import NAMES, generator_of, in_pieces
from memopt.memory.hand_over import Due

HEAD = "def call(args):\n    w, x, t = args\n    args.clear()\n"


def pieces_of(body, *due, shown=None):
    return in_pieces(HEAD + "".join(f"    {line}\n" for line in body.split("\n")), due, shown or {})


def order(pieces):
    """The lines of the code, those that give as their numbers."""
    lines = [line.strip() for line in pieces.source.splitlines()[3:]]
    return [line for line in lines if line]


def due(*outputs, shown=()):
    return Due(outputs, frozenset(shown))


def test_what_is_given_is_given_behind_the_last_line_that_names_it_and_what_is_dropped_there():
    found = pieces_of(
        "a = empty_strided_cpu()\nkernel(a, x)\ndel x\nb = empty_strided_cpu()\nkernel(b, t)\nreturn (a, b)", due(0)
    )
    assert found.outputs == ((0,),)
    assert order(found) == [
        "a = empty_strided_cpu()",
        "kernel(a, x)",
        "del x",
        "_memopt_give(0, (a,))",
        "del a",
        "yield",
        "b = empty_strided_cpu()",
        "kernel(b, t)",
        "return (None, b)",
    ]


def test_a_parameter_that_is_read_later_makes_it_wait():
    body = "a = empty_strided_cpu()\nkernel(a, x)\nb = empty_strided_cpu()\nkernel(b, w)\nreturn (a, b)"
    found = pieces_of(body, due(0, shown=["w"]))
    assert order(found).index("_memopt_give(0, (a,))") > order(found).index("kernel(b, w)")


def test_other_names_of_its_memory_make_it_wait_and_are_dropped():
    body = "a = empty_strided_cpu()\nc = reinterpret_tensor(a, (2,), (1,), 0)\nkernel(x)\nkernel(c)\nreturn (a, t)"
    found = order(pieces_of(body, due(0)))
    assert found[3:7] == ["kernel(c)", "_memopt_give(0, (a,))", "del a, c", "yield"]


def test_results_of_one_operator_go_once_their_tuple_is_dropped():
    body = "a = torch.ops.aten.convolution_backward.default(x, w)\nb = a[1]\nc = a[2]\ndel a\nkernel(t)"
    body += "\nreturn (b, c, None)"
    found = pieces_of(body, due(0, 1))
    assert found.outputs == ((0, 1),) and order(found)[3:7] == ["del a", "_memopt_give(0, (b, c))", "del b, c", "yield"]


@pytest.mark.parametrize(
    "body",
    [
        "a = empty_strided_cpu()\nkernel(a)\nreturn (a, a)",  # two results show it
        "a = empty_strided_cpu()\nkernel(a)\nreturn (a, reinterpret_tensor(a, (2,), (1,), 0))",
        "kernel(x)\nreturn (x, t)",  # what was given
        "a = torch.ops.aten.view.default(x, [2])\nkernel(t)\nreturn (a, t)",  # shows what was given
        "a = unknown(x)\nkernel(t)\nreturn (a, t)",
        "kernel(x)\nreturn (None, t)",
        "a = empty_strided_cpu()\nkernel(a)\nreturn tuple(a)",
    ],
)
def test_what_others_show_stays_to_the_end(body):
    assert pieces_of(body, due(0)) is None


def test_the_code_of_a_module_runs_in_pieces_and_looks_at_parameters_that_it_reads_later():
    source = HEAD + "    a = make(x)\n    b = make(w)\n    return (a, b)\n"
    source = source.replace("make(", "extern_kernels.make(")
    module = types.ModuleType("generated")
    module.__file__ = "generated.py"
    module.extern_kernels = types.SimpleNamespace(make=lambda value: [value.number])
    found = in_pieces(source, [due(0), due(1)], {"w": "layer.weight"})
    generate, given = generator_of(found, module), []

    class Value:
        _version, number = 0, 7

    weight = Value()
    pieces = generate([weight, Value(), Value()], lambda number, values: given.append((number, values)))
    next(pieces)
    assert given == [(0, ([7],))]
    weight._version = 1
    with pytest.raises(RuntimeError, match=r"^layer\.weight was changed by a hook"):
        next(pieces)
    assert set(NAMES) <= set(vars(module))


def test_code_of_a_class_is_edited_too():
    source = (
        "class Runner:\n    def call(self, args):\n        x, = args\n        args.clear()\n        with guard(0):\n"
    )
    source += (
        "            a = empty_strided_cuda()\n            kernel(a)\n            kernel(x)\n        return (a, )\n"
    )
    found = in_pieces(source, [due(0)], {})
    assert (
        "        with guard(0):\n            a = empty_strided_cuda()\n            kernel(a)\n            _memopt_give"
        in found.source
    )
