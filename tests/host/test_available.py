"""What of the host's memory is to be had."""

import pytest

from memopt.host import available


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name in ("_LIMIT", "_USED", "_SYSTEM"):
        monkeypatch.setattr(available, name, tmp_path / name)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "_SYSTEM").write_text("MemTotal: 900 kB\nMemAvailable:   600 kB\n")
    return tmp_path


def test_what_the_system_says(files):
    assert available.available_bytes() == 600 * 1024


def test_a_container_has_less(files):
    (files / "_LIMIT").write_text("100000\n")
    (files / "_USED").write_text("40000\n")
    assert available.available_bytes() == 60000
    (files / "_LIMIT").write_text("max\n")
    assert available.available_bytes() == 600 * 1024


def test_processes_share_it(files, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available.available_bytes() == 75 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert available.available_bytes() == 600 * 1024


def test_another_system(files, monkeypatch):
    (files / "_SYSTEM").unlink()
    monkeypatch.setattr(available.os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}[name])
    assert available.available_bytes() == 40960

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(available.os, "sysconf", unknown)
    assert available.available_bytes() == 0
