"""What is not written over: inputs, outputs, what is read later, layouts that do not fit."""

from __future__ import annotations

import torch

from memopt.memory.over_operands import inplace_overload
from memopt.memory.timeline import timeline
from memopt.passes.inplace import Inplace
from tests.passes.test_inplace import S, X, aten, check, trace
from tests.support import apply


def test_inputs_and_their_views_are_kept():
    inputs = "lives in the memory of the input x_1"
    check(lambda x: (x.relu(), x.view(24).exp()), X, expected={}, reasons={"relu": inputs, "exp": inputs})


def test_outputs_and_their_views_are_kept():
    returned = "the memory of mm is returned"
    check(lambda x: (lambda y: (y, y.relu()))(x @ x), S, expected={}, reasons={"relu": returned})
    check(lambda x: (lambda y: (y.relu(), y[0]))(x @ x), S, expected={}, reasons={"relu": returned})


def test_a_view_that_lives_on():
    def function(x):
        y = x @ x
        row = y[0]
        return y.relu(), row.sum()

    check(function, S, expected={}, reasons={"relu": "the memory of mm is read later, by sum_1"})


def test_a_base_that_lives_on():
    def function(x):
        y = x @ x
        return y.view(25).relu(), y.sum()

    check(function, S, expected={}, reasons={"relu": "the memory of view is read later, by sum_1"})


def test_a_storage_that_was_taken_over_lives_on():
    def function(x):
        y = (x @ x).relu()
        return y.exp(), y.sum()

    check(function, S, expected={"relu": "mm"}, reasons={"exp": "the memory of relu is read later, by sum_1"})


def test_the_same_storage_in_another_order():
    check(
        lambda x: ((lambda y: y + y.t())(x @ x),),
        S,
        expected={},
        reasons={"add": "reads the memory of mm in another order too, through t"},
    )
    check(
        lambda x: ((lambda y: y * y[:1])(x @ x),),
        S,
        expected={},
        reasons={"mul": "in another order too, through slice_1"},
    )


def test_layouts_that_do_not_fit():
    cases = [
        lambda x: ((x @ x)[:, :1].expand(5, 5).relu(),),  # elements overlap
        lambda x: ((x @ x)[1:].relu(),),  # a part of the storage
        lambda x: ((x @ x)[:4].relu(),),
        lambda x: ((x @ x)[:1] + x,),  # broadcast
        lambda x: ((x @ x) > 0,),  # another type
        lambda x: ((x @ x).to(torch.float16) + x,),  # promoted
        lambda x: (torch.softmax(x @ x, 0),),  # not element-wise
        lambda x: ((x @ x)[:0].relu(),),  # empty
        lambda x: (2 ** (x @ x),),  # the tensor is not the first argument
        lambda x: ((x @ x).unfold(0, 3, 1).relu(),),  # windows overlap
    ]
    for function in cases:
        result = apply(Inplace(), trace(function, S))
        assert result.changes == () and result.refusals == ()


def test_random_operators_are_left_alone():
    result = apply(Inplace(), trace(lambda x: (aten.native_dropout(x @ x, 0.5, True)[0].relu(),), S))
    assert [change.after for change in result.changes] == [("relu",)]  # the item is no program input, and dies
    assert inplace_overload(aten.rrelu.default) is None
    assert inplace_overload(aten.bernoulli.p) is None


def test_saved_tensors_are_kept():
    def function(x, tangent):
        hidden = (x @ x).sigmoid()
        output = hidden.exp()
        gradient = tangent * output
        return output, gradient * hidden, hidden.relu()

    reasons = {
        "exp": "the memory of sigmoid is read later, by relu",
        "mul": "the memory of the input tangent_1",
        "relu": "saved tensor: backward may run again on it",
    }
    program = check(
        function, S, S.clone(), expected={"sigmoid": "mm", "mul_1": "mul"}, reasons=reasons, backward_from=3
    ).program
    assert timeline(program).saved_bytes == 2 * S.nbytes


def test_views_made_in_backward_of_saved_tensors_are_kept():
    def function(x, tangent):
        hidden = x @ x
        output = hidden.sum()
        return output, hidden.t().relu() * tangent

    check(
        function,
        S,
        S.clone(),
        expected={"mul": "relu"},
        reasons={"relu": "saved tensor: backward may run again on it"},
        backward_from=2,
    )
