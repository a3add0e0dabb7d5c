"""The benchmark of budgets that chunks keep: a row is run, and rows are told."""

import argparse

from benchmarks import chunks


def test_a_row_is_compiled_run_and_timed(tmp_path):
    given = argparse.Namespace(
        model="resnet18", device="cpu", dtype="float32", backend="aten", budget="none", freeze=False, tiny=True,
        lock=str(tmp_path / "lock"),
    )  # fmt: skip
    found = chunks.row(given)
    assert found["backend"] == "aten" and found["milliseconds"] > 0 and found["error"] < 1e-4
    line = chunks.text(found)
    assert line.split()[:2] == ["none", "aten"] and "MiB reserved" in line


def test_a_refused_row_says_why():
    assert chunks.text({"budget": "1kB", "refused": "no plan fits", "notes": []}) == "     1kB  refused: no plan fits"
