"""The README's counts, beside the records that they are of."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks/results"


def number(text):
    return int(text.replace(",", ""))


def test_the_classes_that_train():
    rows = json.loads((RESULTS / "classes_aten.json").read_text())["rows"]
    trained = sum(row["training"] == "ok" and row["inference"] == "ok" for row in rows)
    (said,) = re.findall(r"All of \[(\d+) model classes\]", README)
    assert int(said) == len(rows) == trained


def test_the_random_modules():
    """Of each engine: how many ran, were the same, were refused or ran as they are, and were wrong."""
    sums = {}
    counted = (RESULTS / "modules.md").read_text().split("## Loops as users write them")[0]  # of loops of another kind
    for columns, engine in ((8, "aten"), (9, "inductor")):
        rows = [line.split("|")[1:-1] for line in counted.splitlines() if line[:4] == "| 20"]
        rows = [[cell.strip() for cell in row] for row in rows if len(row) == columns]
        counts = [[number(re.match(r"[\d,]+", row[at])[0]) for row in rows] for at in (3, -4, -3, -2, -1)]
        sums[engine] = [sum(count) for count in counts]
    run, same, refused, as_they_are, wrong = sums["aten"]
    said = re.search(
        r"Of \[([\d,]+) random modules\].*? ([\d,]+) did as in\neager on.*?and ([\d,]+) were.*?; (\d+) differed",
        README,
        re.S,
    )
    assert said and [number(text) for text in said.groups()] == [run, same, refused + as_they_are, wrong]
    said = re.search(r"Of ([\d,]+) on\n`inductor` (\d+) differed", README)
    assert said and [number(text) for text in said.groups()] == [sums["inductor"][0], sums["inductor"][-1]]


def test_the_conversions():
    counted = re.match(r"(\d+) of \1 models converted", (RESULTS / "conversions.md").read_text())
    assert counted and f"[{counted[1]} models](benchmarks/results/conversions.md) were converted" in README
