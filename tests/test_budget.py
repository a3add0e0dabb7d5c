"""Budgets: what is read, what is refused and how, what is printed."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.budget import Budget, BudgetError, OutOfBudgetError, format_bytes, parse_budget


@dataclasses.dataclass
class Breakdown:
    parameters: int = 500
    gradients: int = 500
    optimizer_state: int = 1_000
    activations: int = 3_000_000
    workspace: int = 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        ("20gb", 20 * 10**9),
        ("20gib", 20 * 2**30),
        (" 512 MB ", 512 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("800kB", 800_000),
        ("800KB", 800_000),
        ("2KiB", 2048),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("1PB", 10**15),
        ("7B", 7),
        ("+3MB", 3 * 10**6),
        (".5kB", 500),
        ("0.1GB", 10**8),
        ("1.0005kB", 1000),
        ("20G", 20 * 10**9),
        ("20 g", 20 * 10**9),
        ("1.5Gi", 3 * 2**29),
        ("512k", 512_000),
        ("1e3MB", 10**9),
        ("1E3MB", 10**9),
        ("2.5e-1GiB", 2**28),
        ("1e+2M", 10**8),
        (20, 20),
        (10**9, 10**9),
        (np.int64(4096), 4096),
    ],
)
def test_sizes(text, size):
    budget = parse_budget(text)
    assert (budget.bytes, budget.fraction) == (size, None)
    assert budget.resolve(10**12) == size
    assert budget.text == str(text).strip()


@pytest.mark.parametrize(
    ("text", "fraction", "of_1000"),
    [("60%", 0.6, 600), ("100 %", 1.0, 1000), (0.5, 0.5, 500), (1.0, 1.0, 1000), ("0.25", 0.25, 250)],
)
def test_fractions(text, fraction, of_1000):
    budget = parse_budget(text)
    assert (budget.bytes, budget.fraction) == (None, fraction)
    assert budget.resolve(1000) == of_1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20", "20 what? say 20GB or 20GiB"),
        ("20XB", "unknown unit 'XB'"),
        ("20e3", "20e3 what?"),
        ("20E", "unknown unit 'E'"),
        ("1e9999GB", "unknown unit"),
        ("1e-400GB", "less than one byte"),
        ("20iB", "unknown unit"),
        ("20GB please", "unknown unit"),
        ("-1GB", "more than nothing"),
        ("0GB", "more than nothing"),
        ("0.1B", "less than one byte"),
        ("1e400GB", "more than any device"),
        ("9000000PB", "more than any device"),
        ("9" * 5000 + "GB", "too many digits"),
        (0, "more than nothing"),
        (-5, "more than nothing"),
        (0.0, "more than nothing"),
        ("0%", "more than nothing"),
        ("150%", "at most 1"),
        (2.5e9, "write bytes as an int"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        ("nan", "write a size"),
        ("infGB", "write a size"),
        ("", "write a size"),
        ("GB", "write a size"),
        ("\u0662\u0660GB", "write a size"),
        (True, "write a size"),
        (None, "of type NoneType"),
        ([20], "of type list"),
    ],
)
def test_refused_in_one_clear_line(text, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        parse_budget(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 160


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (20 * 10**9, "20.00 GB (18.63 GiB)"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB (1000 B)"),
        (999_999, "1.00 MB (976.56 KiB)"),
        (2**20 - 1, "1.05 MB (1.00 MiB)"),
        (-1_500_000, "-1.50 MB (-1.43 MiB)"),
        (5 * 10**18, "5000.00 PB (4440.89 PiB)"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text
    assert format_bytes(size, short=True) == text.split(" (")[0]


@given(st.integers(1, 10**17))
def test_what_is_printed_reads_back(size):
    printed = parse_budget(format_bytes(size, short=True)).bytes
    assert abs(printed - size) <= max(size * 0.0051, 0)


def test_budget_error_says_what_would_help():
    error = BudgetError(minimum_bytes=3_001_999, budget_bytes=1_000_000, breakdown=Breakdown())
    assert isinstance(error, ValueError)
    assert str(error) == (
        "no plan fits the budget of 1.00 MB (976.56 KiB): the minimum is 3.00 MB (2.86 MiB), the largest parts "
        "activations 3.00 MB, optimizer state 1.00 kB, parameters 500 B. What would help: a budget of 3.01MB, "
        "a smaller batch or an optimizer with less state"
    )
    weights = Breakdown(optimizer_state=0, activations=0)
    assert str(BudgetError(minimum_bytes=1000, budget_bytes=900, breakdown=weights)).endswith("a budget of 1.00kB")
    assert "parts" not in str(BudgetError(minimum_bytes=1000, budget_bytes=900))


@given(st.integers(1, 10**17))
def test_the_advised_budget_is_enough(minimum):
    message = str(BudgetError(minimum_bytes=minimum, budget_bytes=1))
    advised = parse_budget(re.search(r"help: a budget of (\S+)", message)[1]).bytes
    assert minimum <= advised <= minimum * 1.011


def test_budget_error_says_what_the_allocator_cannot_hand_back():
    message = str(BudgetError(minimum_bytes=2000, budget_bytes=1000, breakdown=Breakdown(), stuck_bytes=247_500_000))
    assert "the allocator caches 247.50 MB that it cannot hand back" in message
    assert message.endswith("or torch.cuda.empty_cache() before those tensors are made") and "\n" not in message


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_budget_error_pickles(clone):
    error = BudgetError(minimum_bytes=2000, budget_bytes=1000, breakdown=Breakdown(), stuck_bytes=500)
    error.__notes__ = ["seen on rank 1"]
    again = clone(error)
    assert type(again) is BudgetError and str(again) == str(error)
    assert (again.minimum_bytes, again.budget_bytes, again.breakdown) == (2000, 1000, Breakdown())
    assert again.stuck_bytes == 500
    assert again.__notes__ == ["seen on rank 1"]


def test_budget_is_frozen_and_comparable():
    assert parse_budget("1kB") == Budget(1000, None, "1kB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_budget("1kB").bytes = 3


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_refused_call_says_all_that_the_refusal_does(clone):
    error = BudgetError(200, 100)
    error.args = (f"{error}; its batch cannot be run in chunks",)
    refused = clone(OutOfBudgetError.of(clone(error)))
    assert "cannot be run in chunks" in str(refused) and "out of memory" in str(refused)
    assert isinstance(refused, RuntimeError) and refused.minimum_bytes == 200


def test_a_minimum_with_much_that_is_only_allowed_for_says_so():
    error = BudgetError(1000, 500, beside="a head holds 100 B")
    assert error.allowing(970) is error
    found = error.allowing(969)
    assert (found.minimum_bytes, found.budget_bytes) == (1000, 500)
    assert "a head holds 100 B; a loss that was not seen yet is allowed 31 B: the minimum is at most that" in str(found)
    assert "at most that, and 969 B where the loss holds nothing" in str(found)
    assert "a loss of float32[9] (36 B, model.py:3) that was" in str(error.allowing(9, "float32[9] (36 B, model.py:3)"))
