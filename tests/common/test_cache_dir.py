import sys
from pathlib import Path

import pytest

from memopt.common.cache_dir import cache_dir


@pytest.fixture
def bare(monkeypatch, tmp_path):
    for name in ("MEMOPT_CACHE", "MEMOPT_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("linux", ".cache/memopt"), ("darwin", "Library/Caches/memopt"), ("win32", "AppData/Local/memopt/Cache")],
)
def test_the_platforms_folder(bare, monkeypatch, platform, expected):
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_dir() == bare / expected


def test_the_variable_decides_and_nothing_is_created(bare, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(bare / "named"))
    assert cache_dir() == bare / "named"
    assert list(bare.iterdir()) == []


def test_xdg_counts_when_it_is_absolute(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare / "xdg"))
    assert cache_dir() == bare / "xdg" / "memopt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == bare / ".cache" / "memopt"


def test_off_means_nowhere(bare, monkeypatch):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(bare))
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    assert cache_dir() is None


def test_a_user_without_a_home_has_no_cache(bare, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir() is None
