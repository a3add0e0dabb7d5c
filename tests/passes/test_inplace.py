"""Inplace: who may take whose storage, case by case, and random graphs run as annotated."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.backends.aten import emit
from memopt.memory.measure import measure
from memopt.memory.over_operands import inplace_overload
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.inplace import Inplace, takes_storage
from memopt.program import Input, InputKind, Output, OutputKind, Phase, Program
from tests.support import apply, assert_same

aten = torch.ops.aten


def trace(function, *tensors, backward_from=None):
    """The program of a function of tensors; with `backward_from`, one output is forward's and the last input a tangent.

    Args:
        backward_from: how many call nodes make the forward phase.
    """
    module = make_fx(function, tracing_mode="fake")(*tensors)
    values = list(module.graph.output_node().args[0])
    training = backward_from is not None
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [Input(name, InputKind.USER) for name in names]
    if training:
        inputs[-1] = Input(names[-1], InputKind.TANGENT)
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        for index, node in enumerate(calls):
            node.meta["phase"] = Phase.FORWARD if index < backward_from else Phase.BACKWARD
    outputs = [Output(OutputKind.USER) for _ in values]
    program = Program(module, tuple(inputs), tuple(outputs), training=training, forward_outputs=int(training))
    program = program.copy().finish()
    program.check()
    return program


class Obedient(fx.Interpreter):
    """Runs a graph as annotated, and checks that annotated results are where they should be."""

    def run_node(self, n):
        if "inplace" not in n.meta:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = inplace_overload(n.target)(*args, **kwargs)
        assert result.data_ptr() == args[n.meta["inplace"]].data_ptr()
        return result


def run_annotated(program, tensors):
    return Obedient(program.graph_module).run(*tensors, enable_io_processing=False)


def check(function, *tensors, expected, reasons=(), backward_from=None):
    """Annotations as expected, refusals that say what `reasons` says, and bitwise the same results and inputs."""
    program = trace(function, *tensors, backward_from=backward_from)
    result = apply(Inplace(), program)
    found = {node.name: takes_storage(node).name for node in result.program.calls if takes_storage(node) is not None}
    assert found == expected
    assert [change.after for change in result.changes] == [(name,) for name in found]
    said = {refusal.node: refusal.reason for refusal in result.refusals}
    for node, reason in dict(reasons).items():
        assert reason in said[node]
    assert len(said) == len(dict(reasons))
    before = [t.clone() for t in tensors]
    outcome = run_annotated(result.program, tensors)
    assert_same(list(tensors), before)
    assert_same(outcome, list(function(*tensors)))
    assert_same(emit(result.program.graph_module)(list(tensors)), outcome)
    return result


X = torch.randn(4, 6)
S = torch.randn(5, 5)


# -- what is annotated --------------------------------------------------------------------------------------------


def test_a_chain_takes_one_storage():
    def chain(x):
        return (((x + 1).relu() * 2).sigmoid(),)

    result = check(
        chain,
        X,
        expected={"relu": "add", "mul": "relu", "sigmoid": "mul"},
        reasons={"add": "lives in the memory of the input x_1"},
    )
    assert timeline(result.program).peak_bytes == X.nbytes
    run = emit(result.program.graph_module)
    assert X.nbytes <= measure(lambda: run([X])).peak_bytes <= X.nbytes + 16  # numbers become tensors for a moment


def test_a_view_of_the_whole_storage_hands_it_over():
    check(lambda x: ((x @ x).view(25).relu().view(5, 5),), S, expected={"relu": "view"})
    check(lambda x: ((x @ x).t().relu(),), S, expected={"relu": "t"})


def test_items_of_multiple_results():
    check(
        lambda x: [torch.sort(x)[0].exp()],
        X,
        expected={"exp": "getitem"},
    )
    check(
        lambda x: (lambda v, i: [v.exp(), i])(*torch.sort(x)),
        X,
        expected={"exp": "getitem"},
    )


def test_the_same_tensor_twice():
    check(lambda x: ((lambda y: y * y)(x @ x),), S, expected={"mul": "mm"})
    check(lambda x: ((lambda y: torch.addcmul(y, y, y))(x @ x),), S, expected={"addcmul": "mm"})


def test_a_product_that_is_added_to_a_sum():
    check(lambda x: (torch.addmm(x @ x, x, x),), S, expected={"addmm": "mm"})
    check(lambda x: (torch.addmm(torch.addmm(x @ x, x, x), x, x, beta=0.5),), S,
          expected={"addmm": "mm", "addmm_1": "addmm"})  # fmt: skip
    check(
        lambda x: ((lambda y: torch.addmm(y, y, x))(x @ x),),
        S,
        expected={},
        reasons={"addmm": "it multiplies the memory of mm too, through mm"},
    )
    check(
        lambda x: ((lambda y: torch.addmm(y, x, y.t()))(x @ x),),
        S,
        expected={},
        reasons={"addmm": "it multiplies the memory of mm too, through t"},
    )
    check(lambda x: (torch.addmm((x @ x)[0], x, x),), S, expected={})


def test_operators_that_need_another_form():
    check(
        lambda x: (torch.pow(torch.nn.functional.hardswish(x @ x), 2),),
        S,
        expected={"hardswish": "mm", "pow_1": "hardswish"},
    )
    check(lambda x: (torch.maximum(x @ x, x),), S, expected={"maximum": "mm"})
    check(lambda x, g: (aten.threshold_backward(g @ g, x, 0),), S, S + 1, expected={"threshold_backward": "mm"})


def test_the_result_may_be_an_output():
    check(lambda x: ((x @ x).relu(), x @ x), S, expected={"relu": "mm"})


# -- the pass as a whole ----------------------------------------------------------------------------------------------


def test_stale_annotations_are_forgotten():
    program = trace(lambda x: (lambda y: (y, y.relu(), (x @ x).exp()))(x @ x), S)
    stale = program.copy()
    next(node for node in stale.calls if node.name == "relu").meta["inplace"] = 0
    result = apply(Inplace(), stale)
    assert {node.name for node in result.program.calls if takes_storage(node)} == {"exp"}
    assert [change.after for change in result.changes] == [("exp",), ("relu",)]
    assert "no longer" in result.changes[1].summary
    assert apply(Inplace(), result.program).changes == ()


def test_refusals_are_capped_at_the_largest():
    def function(x):
        values = [x[: i + 1].exp() for i in range(70)]
        return (*values, *[value.relu() for value in values])

    result = Inplace().run(trace(function, torch.randn(70)))
    assert len(result.refusals) == 50
    assert "relu" not in {refusal.node for refusal in result.refusals}  # of one element


def test_it_stands_in_the_pass_manager():
    program, records = PassManager([Inplace()]).run(trace(lambda x: ((x @ x).relu(),), S))
    assert records[0].evidence is not None and len(records[0].changes) == 1
    assert_same(program.run(S), [(S @ S).relu()])


# -- random graphs ------------------------------------------------------------------------------------------------

UNARY = [torch.relu, torch.exp, torch.sigmoid, lambda x: x * 0.5, lambda x: x.clamp(-1, 1), torch.tanh]
BINARY = [torch.add, torch.mul, torch.maximum, torch.sub, lambda x, y: (x > y).to(x.dtype), torch.atan2]
VIEWS = [
    lambda x: x.t(),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x[:1].expand(x.shape),
    lambda x: x[::2],
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: torch.sort(x, 0)[0],
    lambda x: torch.max(x, 0)[0],
    lambda x: torch.split(x, 2)[0],
    lambda x: x.clone(),
    lambda x: x.double(),
]
STEP = st.tuples(st.sampled_from([*UNARY, *BINARY, *VIEWS]), st.integers(0, 40), st.integers(0, 40))


@settings(max_examples=200)
@given(st.lists(STEP, min_size=2, max_size=14), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.booleans())
def test_random_graphs_run_as_annotated(steps, outputs, training):
    tensors = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 4)]
    values, plan = list(tensors), []
    for call, first, second in steps:
        operands = [first % len(values), second % len(values)][: 1 if call in [*UNARY, *VIEWS] else 2]
        operands = [len(values) - 1 - index for index in operands]  # the latest first
        try:
            values.append(call(*[values[index] for index in operands]))
            plan.append((call, operands))
        except (RuntimeError, IndexError):
            continue  # the shapes do not go together

    def function(*tensors):
        values = list(tensors)
        for call, operands in plan:
            values.append(call(*[values[index] for index in operands]))
        return tuple(values[-1 - index % len(values)] for index in outputs)

    program = trace(function, *tensors)
    if training:
        half = len(program.calls) // 2
        for index, node in enumerate(program.calls):
            node.meta["phase"] = Phase.FORWARD if index < half else Phase.BACKWARD
    result = Inplace().run(program)
    expected = program.run(*tensors)
    before = [t.clone() for t in tensors]
    assert_same(run_annotated(result.program, tensors), expected)
    assert_same(emit(result.program.graph_module)(list(tensors)), expected)
    assert_same(tensors, before)
    assert timeline(result.program).peak_bytes <= timeline(program).peak_bytes
