"""What is kept of finished work: loaded by its key and version, and never trusted where it is damaged."""

import zlib

import pytest

from memopt.common.cache_dir import cache_dir
from memopt.step import compile_cache
from memopt.step.compile_cache import CompileCache


class Sizes(CompileCache[tuple[int, ...]]):
    kind = "test_sizes"

    @staticmethod
    def encoded(entry):
        return {"sizes": list(entry)}

    @staticmethod
    def decoded(record):
        return tuple(int(size) for size in record["sizes"])


def test_what_was_put_is_found_by_its_key():
    assert Sizes().get("key") is None
    assert Sizes().put("key", (1, 2)) and Sizes().put("other", ())
    assert Sizes().get("key") == (1, 2) and Sizes().get("other") == ()
    Sizes().put("key", (3,))
    assert Sizes().get("key") == (3,)


def test_another_version_of_the_code_finds_nothing(monkeypatch):
    Sizes().put("key", (1, 2))
    monkeypatch.setattr(compile_cache, "versions", lambda: "another")
    assert Sizes().get("key") is None


def test_a_kind_has_a_folder_of_its_own():
    class Others(Sizes):
        kind = "test_others"

    Sizes().put("key", (1, 2))
    assert Others().get("key") is None
    Others().put("key", (3,))
    assert Sizes().get("key") == (1, 2)
    assert {path.name for path in cache_dir().iterdir()} >= {"test_sizes", "test_others"}


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, zlib.error])
def test_a_record_that_is_none_counts_as_absent(monkeypatch, error):
    def decoded(record):
        raise error("damaged")

    Sizes().put("key", (1, 2))
    monkeypatch.setattr(Sizes, "decoded", staticmethod(decoded))
    assert Sizes().get("key") is None


def test_an_error_of_the_reader_s_own_is_not_hidden(monkeypatch):
    def decoded(record):
        raise AssertionError("a mistake in this code")

    Sizes().put("key", (1, 2))
    monkeypatch.setattr(Sizes, "decoded", staticmethod(decoded))
    with pytest.raises(AssertionError):
        Sizes().get("key")


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("memopt.memory.cost.disk.cache_dir", lambda: None)
    assert not Sizes().put("key", (1, 2)) and Sizes().get("key") is None
