"""The figures of the README, of docs/results.md and of the pages are those of the committed results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.render_compare import compare_table
from benchmarks.render_loops import loops_table
from benchmarks.render_training import ratios_table, training_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_readme_and_pages_agree_with_the_results():
    check = [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"]
    found = subprocess.run(check, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_is_whole_in_a_document_that_the_readme_links_to(path):
    readme = (ROOT / "README.md").read_text()
    assert "(docs/results.md)" in readme
    page = path.with_suffix(".md")  # a table too long for a document has a page of its own
    if page.exists():
        assert f"(benchmarks/results/{page.name})" in readme
        assert page in render.texts()
    else:
        assert any(f"<!-- results: {path.name} -->" in document.read_text() for document in render.DOCUMENTS)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_figure_that_is_changed_by_hand_is_seen(path, tmp_path, monkeypatch):
    """No figure of a table is typed: another number in the file is another number on the page."""
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    kind = path.stem.split("_")[0]
    table = render.TABLES.get(kind) or render.PAGES[kind]
    result = json.loads(path.read_text())
    rows = result["comparisons"][0]["rows"] if "comparisons" in result else result["rows"]
    before = table(json.loads(path.read_text()))
    figures = [[key for key, value in row.items() if type(value) in (int, float)] for row in rows]
    row, keys = max(zip(rows, figures, strict=True), key=lambda pair: len(pair[1]))  # some say only why they have none
    for key in keys:
        row[key] = row[key] * 3 + 7
    assert keys and table(result) != before


def test_loops_of_users_stand_in_one_table_with_what_was_reserved_at_most():
    told = {"machine": "H200", "torch": "2.11", "transformers": "5.17", "allocator": "", "model": "gpt2"}
    whole = {"row": "compile", "seconds": 0.1, "reserved_bytes": 20_000_000}
    half = {"row": "memopt:0.5", "seconds": 0.12, "reserved_bytes": 9_000_000, "budget_bytes": 10_000_000}
    # The most of a later step is not that of the first, which planning may have set back.
    half["first_step_reserved_bytes"] = 11_000_000
    refused = {"row": "memopt:0.3", "reason": "refused: the minimum is 7 MB"}
    late = {"row": "memopt:0.3", "reason": "not ready within the 10 s"}
    results = [{**told, "settings": {"batch": 4}, "rows": [whole, half, last]} for last in (refused, late)]
    assert loops_table(results).splitlines()[2:] == [
        "| model | torch.compile | eager | 50% | 30% |",
        "|---|---|---|---|---|",
        "| gpt2, batch 4 | 100.0 ms, 20 MB |  | 1.20, 11 of 10 MB, over | refused |",
        "| gpt2, batch 4 | 100.0 ms, 20 MB |  | 1.20, 11 of 10 MB, over | not planned in time |",
    ]


def test_comparisons_say_what_did_not_run():
    row = {"reason": "", "seconds": [0.001, 0.002, 0.003], "error": 1e-3, "process_bytes": 2_000_000}
    row |= {"differs": False, "first_seconds": 1.5}
    eager = {"name": "eager", "allocated_bytes": 1_000_000, **row}
    missing = {"name": "xla", "reason": "needs jax", "seconds": [], "error": None}
    other = {"name": "static", "allocated_bytes": None, **row, "process_bytes": None}
    common = {"mode": "inference", "dtype": "float16", "device": "H100", "versions": {"torch": "2.11"}}
    settings = {"repeats": 3, "batch": 8, "sequence": 128}
    comparisons = [
        {**common, "settings": settings, "model": "bert", "rows": [eager, missing, other]},
        {
            **common,
            "settings": {"repeats": 3, "batch": 4},
            "model": "unet",
            "rows": [eager, {**missing}, {**missing, "name": "static"}],
        },
    ]
    lines = compare_table({"comparisons": comparisons}).splitlines()
    assert "| bert 8, 128 | 2.00 ±0.50 ~ | 2.00 ±0.50 ~ |" in lines
    assert "| unet 4 | 2.00 ±0.50 ~ | - |" in lines
    assert "| bert 8, 128 | 2 (1) | ? |" in lines
    assert "`xla`: needs jax" in lines and "`static` (unet): needs jax" in lines


def test_comparisons_of_training_say_what_was_kept_of_the_budget():
    common = {"reason": "", "seconds": [0.1, 0.1], "error": 1e-3, "differs": False, "first_seconds": 20.0}
    eager = {
        "name": "eager",
        "allocated_bytes": 9_000_000,
        "reserved_bytes": 10_000_000,
        "budget_bytes": None,
        **common,
    }
    ours = {**eager, "name": "inductor:60%", "allocated_bytes": 5_000_000, "budget_bytes": 6_000_000, "differs": True}
    other = {**ours, "name": "xla:60%", "allocated_bytes": None, "gradient_error": None}
    other |= {"reserved_bytes": None, "process_bytes": 7_000_000}
    item = {"mode": "training", "dtype": "bfloat16", "device": "H100", "versions": {"torch": "2.11"}, "model": "gpt2"}
    rows = [{**eager, "gradient_error": 1e-2}, {**ours, "gradient_error": "inf"}, other]
    cut = {**item, "model": "bert", "settings": {"repeats": 2}, "rows": [rows[0]]}
    lines = compare_table({"comparisons": [{**item, "settings": {"repeats": 2, "batch": 4}, "rows": rows}, cut]})
    assert "| gpt2 4 | 100.00 ±0.00 | 100.00 ±0.00 ! | 100.00 ±0.00 ! |" in lines
    assert "| gpt2 4 | 9 (10) | 5 (10) of 6 | process 7 of 6 |" in lines
    assert "| gpt2 4 | 1.0e-02 | inf |  |" in lines and "| gpt2 4 | 20.0 | 20.0 | 20.0 |" in lines
    assert "| bert  | 9 (10) | - | - |" in lines  # a run that was cut


def test_ratios_are_those_of_one_run_and_a_peer_counts_where_it_reserves_no_more():
    def row(name, seconds, reserved, **more):
        return {"row": name, "seconds": seconds, "reserved_bytes": reserved, "kernels_seconds": seconds / 2, **more}

    settings = {"model": "m", "batch": 2, "sequence": 8, "dtype": "bfloat16", "repeats": 7, "jobs": 4}
    rows = [
        row("compile", 2.0, 1000),
        row("checkpoint", 5.0, 600),
        row("compile:0.5", 3.0, 601),
        row("memopt:1.0", 2.1, 990),
        row("memopt:0.6", 2.5, 590, notes=["this graph runs operator by operator"]),
        {"row": "memopt:0.3", "minimum_bytes": 400, "budget_bytes": 300},
        {"row": "memopt:0.5", "error": "not ready"},
        row("memopt:least", 4.0, 650_000_000),
    ]
    result = {"machine": "H100", "torch": "2.11", "allocator": "a:b", "settings": settings, "rows": rows}
    own, kernels, peers = ratios_table([result]).splitlines()[4:]
    assert own == (
        "| m, batch 2, sequence 8, bfloat16 | memopt | 1.05 | - | 1.25¹ | - | - | refused | 2.00 in 650 MB |"
    )
    assert kernels == "| | its kernels | 1.05 | - | 1.25 | - | - | - | 2.00 |"
    assert peers.startswith("| | fastest peer | 1.00 compile | 1.50 compile:0.5 | 2.50 checkpoint | - | - | - |")


def test_a_captured_step_shows_no_bytes_that_torch_does_not_count():
    settings = {"model": "m", "batch": 2, "dtype": "bfloat16", "repeats": 7, "jobs": 4}
    note = "forward and backward of the step are captured as CUDA graphs, which was faster"
    row = {"row": "memopt:0.5", "seconds": 0.002, "first_step_seconds": 3.0, "predicted_bytes": 9e6, "peak_bytes": 1e6}
    rows = [{**row, "reserved_bytes": 10e6, "notes": notes} for notes in ([note], [])]
    rows.append({**rows[0], "pooled_bytes": 8e6, "peak_bytes": 9.5e6})
    result = {"machine": "H100", "torch": "2.11", "allocator": "a:b", "settings": settings, "rows": rows}
    captured, other, counted = training_table(result).splitlines()[4:]
    assert counted == "| memopt:0.5 |  | 9 MB | 10 MB | 10 MB | 2.0 ms | 3 s |"
    assert captured == "| memopt:0.5 |  | 9 MB | captured | 10 MB | 2.0 ms | 3 s |"
    assert other == "| memopt:0.5 |  | 9 MB | 1 MB | 10 MB | 2.0 ms | 3 s |"
