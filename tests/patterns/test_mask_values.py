"""What is known of a mask: values that the program owns, and bounds that hold whatever the caller passes."""

import pytest
import torch

from memopt.patterns.mask_values import LARGEST, bounds_of_values, known_value
from memopt.program import InputKind
from tests.passes.build import trace

LOW = torch.finfo(torch.float32).min
FLAGS = torch.tensor([True, False, True])
COUNTS = torch.tensor([3, 0, 1])
VALUES = torch.tensor([0.5, -2.0, 1.0])


def last(function, *tensors, **kinds):
    """The program of a function and the node of its last output."""
    program = trace(lambda *args: (function(*args),), *tensors, **kinds)
    return program, program.output_nodes[-1]


@pytest.mark.parametrize(
    ("function", "tensor", "expected"),
    [
        (lambda m: torch.where(m, 0.0, LOW), FLAGS, (LOW, 0.0)),
        (lambda m: (1.0 - m.float()) * LOW, FLAGS, (LOW, 0.0)),
        (lambda m: (1.0 - m.float()) * -1e4, FLAGS, (-1e4, 0.0)),
        (lambda m: m.float().masked_fill(m, -3.0) + 1, FLAGS, (-2.0, 2.0)),
        (lambda m: (-m.float())[None].expand(2, 3).triu(1), FLAGS, (-1.0, 0.0)),
        (lambda m: m.float().sub(2).mul(-0.5), FLAGS, (0.5, 1.0)),
        (lambda m: torch.full_like(m, 7, dtype=torch.float32), FLAGS, (7.0, 7.0)),
        (lambda m: torch.zeros(3) + torch.ones(3) + m, FLAGS, (1.0, 2.0)),
        (lambda m: m == 3, COUNTS, (0.0, 1.0)),
        (lambda m: m.to(torch.uint8), COUNTS, (0.0, 255.0)),
        (lambda m: m.float() * -1e4, COUNTS, (-1e4 * (2.0**63 - 1), 1e4 * 2.0**63)),
        (lambda m: m.float() * LOW, COUNTS, None),  # overflows for a count of 2
        (lambda m: torch.where(m, 0.0, LOW) * 2, FLAGS, None),
        (lambda m: torch.where(m, 0.0, LOW).half(), FLAGS, None),
        (lambda m: torch.where(m, 0.0, -float("inf")), FLAGS, None),
        (lambda m: m.float().log(), FLAGS, None),
        (lambda m: m + 1, VALUES, None),  # whatever the caller passes
    ],
)
def test_bounds(function, tensor, expected):
    program, node = last(function, tensor)
    found = bounds_of_values(program, node)
    assert found == (None if expected is None else (expected, frozenset()))


@pytest.mark.parametrize("kind", [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT])
def test_bounds_of_what_the_program_holds(kind):
    read = frozenset() if kind is InputKind.CONSTANT else frozenset({"arg0_1"})
    program, node = last(lambda w, i: w[i] * 2, VALUES, COUNTS, kinds={0: kind})
    (found, names) = bounds_of_values(program, node)
    assert found == (-4.0, 2.0)
    assert len(names) == len(read)
    for bad in (float("nan"), -float("inf")):
        program, node = last(lambda w: w * 2, torch.tensor([0.0, bad]), kinds={0: kind})
        assert bounds_of_values(program, node) is None


def test_known_values():
    program, node = last(lambda c: torch.arange(3)[:, None] >= c, COUNTS, kinds={0: InputKind.CONSTANT})
    known = known_value(program, node)
    assert known.value.tolist() == (torch.arange(3)[:, None] >= COUNTS).tolist()
    assert known.read == frozenset()
    program, node = last(lambda b: b.tril(), torch.ones(3, 3), kinds={0: InputKind.BUFFER})
    known = known_value(program, node)
    assert known.value.tolist() == torch.ones(3, 3).tril().tolist()
    assert known.read == {program.inputs[0].name}


def test_values_that_are_not_known():
    assert known_value(*last(lambda m: m + 1, COUNTS)) is None
    assert known_value(*last(lambda: torch.rand(3))) is None
    assert known_value(*last(lambda: torch.zeros(1).expand(LARGEST + 1))) is None
    mutated = trace(lambda b: (b + 1, b * 2), torch.ones(3), kinds={0: InputKind.BUFFER}, mutated={0: 0})
    assert known_value(mutated, mutated.output_nodes[-1]) is None
    assert bounds_of_values(mutated, mutated.output_nodes[-1]) is None
