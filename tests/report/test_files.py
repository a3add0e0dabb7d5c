import json
import os
import stat

import pytest

import memopt
from memopt.report import load, render, write_whole
from tests.end_to_end import build
from tests.report.samples import report


def test_save_and_load(tmp_path):
    report().save(tmp_path / "report.json")
    assert load(tmp_path / "report.json") == report()


@pytest.mark.parametrize(("name", "start"), [("a.html", "<!doctype html>"), ("a.TXT", "<script>")])
def test_form_follows_the_suffix(tmp_path, name, start):
    report().save(str(tmp_path / name))
    assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize("name", ["report", "report.pdf", "json"])
def test_other_suffixes_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in .json, .html or .txt"):
        report().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    target.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report().save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert target.read_text() == "old"


def test_new_files_are_as_readable_as_any(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    write_whole(tmp_path / "written", "text")
    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        report().save(tmp_path / "nowhere" / "report.json")


def test_load_names_the_file(tmp_path):
    path = tmp_path / "foreign.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"foreign.json: not a memopt report"):
        load(path)


def test_load_of_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "image.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"image.json"):
        load(path)


def test_render_ends_with_one_newline_and_refuses_unknown_forms():
    for form in ("json", "html", "text"):
        assert render(report(), form)[-2:] not in ("\n\n", "")
        assert render(report(), form).endswith("\n")
    with pytest.raises(ValueError, match="unknown report format 'pdf'"):
        render(report(), "pdf")


def test_a_report_is_read_by_people_and_programs(tmp_path):
    model, inputs = build("gpt2")
    found = memopt.plan(model, inputs, 0.95)
    text = str(found)
    for words in ("GPT2", "budget", "predicted peak", "least possible", "checkpoint"):
        assert words in text
    found.save(tmp_path / "report.json")
    assert load(tmp_path / "report.json") == found
    assert json.loads((tmp_path / "report.json").read_text())
    found.save(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()
    found.save(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == text + "\n"
    with pytest.raises(ValueError, match=r"\.json, \.html or \.txt"):
        found.save(tmp_path / "report.doc")
