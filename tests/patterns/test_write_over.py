"""The operator that says where a value may be computed: what it gives, and what it takes the place of."""

from __future__ import annotations

import pytest
import torch

from memopt.patterns.overwrites import written_over
from memopt.patterns.write_over import WRITE_OVER
from memopt.program import Phase
from tests.passes.build import trace


def program(function, *inputs):
    found = trace(function, *inputs)
    for node in found.calls:
        node.meta.setdefault("phase", Phase.FORWARD)
    return found


def test_it_gives_the_value_and_leaves_what_it_may_take_the_place_of():
    base, value = torch.randn(4, 4), torch.randn(4, 4)
    before = base.clone()
    found = WRITE_OVER(base, value, [base.sum()])
    assert torch.equal(found, value) and torch.equal(base, before)
    assert found.data_ptr() not in (base.data_ptr(), value.data_ptr())


def test_values_that_do_not_look_alike_are_refused():
    with pytest.raises(RuntimeError, match=r"does not fit over \(4, 4\) torch.float32"):
        WRITE_OVER(torch.empty(4, 4, device="meta"), torch.empty(4, 2, device="meta"), [])


def test_the_place_is_that_of_a_value_of_the_same_phase_that_is_no_view():
    x = torch.randn(4, 4)
    found = program(lambda x: (WRITE_OVER(x @ x, x + 1, []),), x)
    product, _, over = found.calls
    assert written_over(over) is product
    product.meta["phase"] = Phase.BACKWARD
    assert written_over(over) is None
    given = program(lambda x: (WRITE_OVER(x, x + 1, []),), x)
    assert written_over(given.calls[-1]) is None, "the caller has it"
    view = program(lambda x: (WRITE_OVER((x @ x).t(), x + 1, []),), x)
    assert written_over(view.calls[-1]) is None
