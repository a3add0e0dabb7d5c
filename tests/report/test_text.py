import dataclasses

import pytest

from memopt.report.text import curve_text, largest_of_groups, sparkline
from tests.report.samples import report


def test_says_what_decides():
    text = str(report())
    assert "budget          900.00 MB (858.31 MiB)" in text
    assert "measured peak   879.00 MB (838.28 MiB): within the budget" in text
    assert "least possible  600.00 MB" in text
    assert "note: no C++ compiler" in text
    assert "kept for backward: 1 tensor, 4.00 MB (3.81 MiB); recomputed: 1 tensor, 1.00 MB" in text
    assert "merge_common refused conv_0:" in text
    assert "merge_common refused 2 more" in text


def test_a_minimum_that_a_plan_of_the_curve_goes_below_is_a_bound():
    sample = report()
    assert sample.curve and "least possible  600.00 MB" in str(sample)
    less = dataclasses.replace(sample, minimum_is_a_bound=True)
    assert "least possible  at most 600.00 MB" in str(less)


def test_a_broken_budget_is_shouted():
    assert "OVER THE BUDGET" in str(dataclasses.replace(report(), measured_peak_bytes=900_000_001))


def test_what_is_unknown_is_not_invented():
    bare = dataclasses.replace(report(), measured_peak_bytes=None, minimum_bytes=None, budget_bytes=None)
    assert "not measured" in str(bare)
    assert "least possible" not in str(bare)
    assert "budget " not in str(bare)


def test_evidence_says_bitwise_or_how_far():
    sample = report()
    first = sample.passes[0]
    exact = dataclasses.replace(first, evidence=dataclasses.replace(first.evidence, max_abs_error=0.0))
    assert "max abs error 1.5e-07, infx the error before (regions: 2 run of 3, 1 not proved)" in str(sample)
    assert "bitwise equal" in str(dataclasses.replace(sample, passes=(exact,)))
    same = dataclasses.replace(first, evidence=dataclasses.replace(first.evidence, regions=0, proved=0))
    assert "equal by structure" in str(dataclasses.replace(sample, passes=(same,)))


@pytest.mark.parametrize("length", [0, 1, 7, 72, 73, 1000])
def test_groups_never_lose_the_peak(length):
    values = list(range(length))
    groups = largest_of_groups(values, 72)
    assert len(groups) == min(length, 72)
    assert max(groups, default=None) == max(values, default=None)


def test_sparkline_runs_from_zero_to_the_largest():
    assert sparkline([0, 7, 14]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([7], top=14) == "▅"


def test_timelines_before_and_after_share_a_scale():
    before, after = (line.split()[1] for line in str(report()).splitlines() if line.startswith(("  before", "  after")))
    assert (before, after) == ("▁█▂", "▁▅▂▁")


def test_the_curve_says_what_less_memory_costs():
    text = str(report())
    assert "→  880.00 MB (839.23 MiB)  550 ms  +10.0%" in text
    assert "what is chosen for this budget" in text
    assert "what more or less" not in str(dataclasses.replace(report(), curve=()))


def test_the_curve_alone():
    text = curve_text(dataclasses.replace(report(), budget_bytes=None))
    assert "what is chosen without a budget" in text
    assert "600.00 MB (572.20 MiB)" in text
    assert "graph_0" not in text
    bare = dataclasses.replace(report(), curve=())
    assert curve_text(bare) == str(bare)
