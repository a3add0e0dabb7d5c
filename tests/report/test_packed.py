from __future__ import annotations

import os
import pickle
import zlib

import pytest

import memopt
from memopt.report.packed import packed, unpacked
from tests.report.samples import report


def test_a_report_comes_back_as_it_was():
    assert unpacked(packed(report())) == report()


def test_a_real_report_holds_nothing_that_does_not_come_back():
    model = memopt.models.build("gpt2_medium", tiny=True)
    inputs = model.example_inputs(2, labels=True)
    found = memopt.compile(model, "90%", backend="aten", example_inputs=inputs).report
    assert found.programs[0].after is not None and found.passes[0].before is not None
    assert unpacked(packed(found)) == found


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no report",
        packed(report())[:-9],
        zlib.compress(b"\x80\x05."),
        zlib.compress(pickle.dumps({"peak_bytes": 3})),
        zlib.compress(pickle.dumps(report().breakdown)),
    ],
)
def test_what_is_no_report_is_refused(data):
    with pytest.raises(ValueError, match="no report"):
        unpacked(data)


class _Order:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_that_a_foreign_file_asks_for_is_run(tmp_path):
    with pytest.raises(ValueError, match="no report"):
        unpacked(zlib.compress(pickle.dumps(_Order(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()
