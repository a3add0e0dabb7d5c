"""What an engine's executables take: on record, in words, and on the page."""

import dataclasses

import pytest
import torch

import memopt
from memopt.report.build import _measured_executable
from memopt.report.record import ExecutableReport
from memopt.report.view import report_view
from tests.report.chromium import browser
from tests.report.samples import report as sample
from tests.support import capture

TITLE = "What the engine's executables take"


@pytest.fixture
def report():
    found = (
        ExecutableReport("forward", 4_000_000, 1_000, 500),
        ExecutableReport("back<ward>", 5_000_000, 2_000, 7_000),
    )
    return dataclasses.replace(sample(), executables=found)


def test_static_says_what_its_arena_and_its_results_take():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).eval()
    x = torch.randn(8, 64)
    with torch.no_grad():
        compiled = memopt.compile(model, backend="static", example_inputs=(x,))
    (one,) = compiled.report.executables
    (program,) = compiled.report.programs
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert one.name == program.name and program.arena is not None
    assert one.arguments == weights + x.numel() * 4
    assert one.outputs == 8 * 10 * 4 and one.temporaries == program.arena.bytes == 8 * 64 * 4
    assert TITLE.lower() in str(compiled.report).lower()


def test_of_a_measured_run_what_is_not_a_result_is_temporary():
    program = capture(torch.nn.Linear(4, 4), torch.ones(2, 4))
    arguments, results = (4 * 4 + 4 + 2 * 4) * 4, 2 * 4 * 4
    assert _measured_executable("g", program, 1_000) == ExecutableReport("g", arguments, results, 1_000 - results)
    assert _measured_executable("g", program, 8) == ExecutableReport("g", arguments, 8, 0)


def test_the_largest_is_the_first_row(report):
    table = report_view(report)["tables"][0]
    assert table["title"] == TITLE
    assert [row[0] for row in table["rows"]] == ["back<ward>", "forward"]
    assert table["rows"][1] == ["forward", "4.00 MB", "1.00 kB", "500 B", "4.00 MB"]
    assert all(item["title"] != TITLE for item in report_view(sample())["tables"])


def test_the_page_shows_them(report, tmp_path):
    report.save(tmp_path / "report.html")
    with browser() as chromium:
        chromium.open(tmp_path / "report.html")
        words = chromium.text("#table-0")
        links = chromium.run("[...document.querySelectorAll('nav a')].map((link) => link.getAttribute('href'))")
        assert chromium.troubles == []
    assert "temporaries" in words and words.index("back<ward>") < words.index("forward") and "#table-0" in links


def test_onnx_runtime_under_a_budget_says_what_a_run_took():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64).eval(), torch.randn(8, 64)
    compiled = memopt.compile(model, "1GB", backend="onnxruntime")
    with torch.no_grad():
        compiled(x)
    (one,) = compiled.report.executables
    assert one.arguments == (64 * 64 + 64 + 8 * 64) * 4 and one.outputs == 8 * 64 * 4
    assert one.peak == compiled.report.measured_peak_bytes
