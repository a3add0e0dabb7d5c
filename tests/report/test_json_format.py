import json

import pytest

from memopt.report.json_format import from_json, to_json
from tests.report.samples import report


def test_round_trip():
    assert from_json(to_json(report())) == report()


def test_is_strict_json_with_schema_and_version():
    def refuse(constant):
        raise AssertionError(constant)

    document = json.loads(to_json(report()), parse_constant=refuse)
    assert document["schema"] == "memopt-report"
    assert document["version"] == 4
    assert document["report"]["passes"][0]["evidence"]["error_ratio"] == "inf"


def edited(edit) -> str:
    document = json.loads(to_json(report()))
    edit(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1]", 'no "schema"'),
        ('{"schema": "other"}', 'no "schema"'),
        (edited(lambda d: d.update(version=99)), "version 99, written by a newer memopt; this memopt reads version 4"),
        (edited(lambda d: d.update(version=3)), "version 3, no longer read; this memopt reads version 4"),
        (edited(lambda d: d["report"].pop("curve")), r"fields of report differ \(curve\)"),
        (edited(lambda d: d["report"]["curve"][1].update(bytes=1.5)), r"report.curve\[1\].bytes is 1.5"),
        (edited(lambda d: d["report"]["curve"][1].update(chosen=1)), r"report.curve\[1\].chosen is 1"),
        (edited(lambda d: d["report"].pop("notes")), r"fields of report differ \(notes\)"),
        (edited(lambda d: d["report"].update(extra=1)), r"fields of report differ \(extra\)"),
        (edited(lambda d: d["report"].update(peak_bytes="many")), "report.peak_bytes is 'many'"),
        (edited(lambda d: d["report"].update(peak_bytes=True)), "report.peak_bytes is True"),
        (edited(lambda d: d["report"].update(programs=None)), "report.programs is None"),
        (edited(lambda d: d["report"]["programs"][0].update(kind="magic")), r"programs\[0\].kind is 'magic'"),
        (edited(lambda d: d["report"].update(breakdown=[])), "report.breakdown is"),
    ],
)
def test_foreign_text_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


def test_a_report_of_before_a_field_came_is_read():
    document = json.loads(to_json(report()))
    del document["report"]["breakdown"]["others"]
    assert from_json(json.dumps(document)) == report()
