import pytest

from memopt.report.curve_table import curve_table, even_points, format_seconds
from memopt.step.curve import CurvePoint


def points(count, chosen):
    return [CurvePoint(1000 - at, 1.0 + at / 100, at / 100, at == chosen) for at in range(count)]


@pytest.mark.parametrize("count", [1, 11, 12, 13, 500])
def test_at_most_twelve_rows_with_both_ends_and_the_chosen_one(count):
    for chosen in {0, count // 3, count - 1}:
        curve = points(count, chosen)
        shown = even_points(curve, 12)
        assert len(shown) == min(count, 12) or (count > 12 and 11 <= len(shown) <= 12)
        assert {curve[0], curve[-1], curve[chosen]} <= set(shown)
        assert shown == sorted(shown, key=lambda point: -point.bytes)


def test_steps_are_even_in_bytes():
    sizes = [point.bytes for point in even_points(points(501, 0), 12)]
    assert sizes == list(range(1000, 499, -50))


def test_lines_hold_bytes_time_and_what_it_adds():
    lines = curve_table(points(2, 1))
    assert lines[1].split() == ["1.00", "kB", "(1000", "B)", "1.00", "s", "+0.0%"]
    assert lines[2].split() == ["→", "999", "B", "1.01", "s", "+1.0%"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (3e-8, "30 ns"), (2.5e-5, "25.00 µs"), (0.05, "50.00 ms"), (0.25, "250 ms"), (75.0, "75.00 s")],
)
def test_seconds_in_the_unit_that_reads_well(seconds, text):
    assert format_seconds(seconds) == text
