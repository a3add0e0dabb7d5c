"""Records on disk: read back, never believed when damaged, never in the way."""

import json
import logging
import multiprocessing
import os
import stat

import pytest

from memopt.memory.cost import disk
from memopt.memory.cost.disk import Store

VALUE = {"seconds": 1.25e-7, "sizes": [1, 2**40], "none": None, "text": "é"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_is_put_is_got(folder):
    store = Store("costs")
    assert store.get("scope", "key") is None and not folder.exists()
    assert store.put("scope", "key", VALUE)
    assert Store("costs").get("scope", "key") == VALUE
    assert store.get("scope", "other") is store.get("other", "key") is Store("plans").get("scope", "key") is None
    assert store.put("scope", "key", {"new": 1})
    assert store.get("scope", "key") == {"new": 1}
    assert len(files(folder)) == 1  # nothing temporary is left


def test_without_a_cache_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    assert not Store("costs").put("scope", "key", VALUE)
    assert Store("costs").get("scope", "key") is None and not folder.exists()


def test_any_changed_byte_is_noticed(folder):
    store = Store("costs")
    store.put("scope", "key", {"seconds": 1.5})
    (path,) = files(folder)
    whole = path.read_bytes()
    for index in range(len(whole)):
        for changed in (whole[:index], whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]):
            path.write_bytes(changed)
            assert store.get("scope", "key") is None, changed
    path.write_bytes(whole)
    assert store.get("scope", "key") == {"seconds": 1.5}


def test_an_entry_of_another_key_scope_or_format_is_foreign(folder, monkeypatch):
    store = Store("costs")
    store.put("scope", "key", VALUE)
    (path,) = files(folder)
    for scope, key in (("scope", "other"), ("other", "key")):
        target = store._path(scope, key)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        assert store.get(scope, key) is None
    monkeypatch.setattr(disk, "FORMAT", disk.FORMAT + 1)
    assert store.get("scope", "key") is None


@pytest.mark.parametrize("text", ["[]", "1", '{"value": {}}', "[" * 100_000, "\ud800", "x" * (disk._LONGEST + 1)])
def test_strange_files_are_ignored(folder, text, caplog):
    store = Store("costs")
    store.put("scope", "key", VALUE)
    (path,) = files(folder)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with caplog.at_level(logging.DEBUG, "memopt"):
        assert store.get("scope", "key") is None
    assert "ignored cache entry" in caplog.text


def test_a_value_must_be_a_dictionary(folder):
    store = Store("costs")
    store.put("scope", "key", VALUE)
    (path,) = files(folder)
    entry = json.loads(path.read_text())
    del entry["digest"]
    entry["value"] = [1]
    path.write_text(json.dumps({**entry, "digest": disk._digest(entry)}))
    assert store.get("scope", "key") is None


def test_what_json_cannot_hold_is_refused_and_leaves_nothing(folder):
    with pytest.raises(ValueError, match="JSON compliant"):
        Store("costs").put("scope", "key", {"seconds": float("nan")})
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.INFO, "memopt"):
        assert not Store("costs").put("scope", "key", VALUE)
    assert "nothing is cached" in caplog.text
    assert Store("costs").get("scope", "key") is None


def test_a_failed_write_leaves_the_old_entry_and_no_other_file(folder, monkeypatch):
    store = Store("costs")
    store.put("scope", "key", VALUE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not store.put("scope", "key", {"new": 1})
    assert store.get("scope", "key") == VALUE and len(files(folder)) == 1


def test_entries_are_the_user_s_own(folder):
    Store("costs").put("scope", "key", VALUE)
    (path,) = files(folder)
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _hammer(number):
    store = Store("costs")
    for turn in range(60):
        store.put("scope", f"key {turn % 3}", {"writer": number, "turn": turn, "long": [number] * 2000})
        found = store.get("scope", f"key {turn % 3}")
        if found is None or found["long"] != [found["writer"]] * 2000:
            return False
    return True


# Not copies of this process: another test may have loaded JAX here, whose threads make a fork a likely deadlock.
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parallel_processes_never_read_half_a_record(folder, processes):
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        assert all(pool.map(_hammer, range(processes)))
    assert len(files(folder)) == 3
