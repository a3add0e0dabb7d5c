"""Small records kept on disk from one process to the next, one file each, by what they belong to.

A record is read only if its file holds exactly the scope and the key that were asked for and the digest fits: what is
damaged, cut off, of another version or another machine counts as absent. Files appear whole, by renaming, so processes
that read and write at the same time need no lock; of two that write the same key one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memopt.common.cache_dir import cache_dir

log = logging.getLogger("memopt")

# Raised whenever what records mean changes: older ones are then absent.
FORMAT = 2
# No record is this long: a longer file is none of ours.
_LONGEST = 1 << 22

Record = Mapping[str, Any]


class Store:
    """Records of one kind, below `cache_dir()/kind`. Without a folder for caches it stays empty."""

    def __init__(self, kind: str) -> None:
        """Name the kind of records; nothing is read or made yet."""
        self.kind = kind

    def get(self, scope: str, key: str) -> Record | None:
        """Return what was put under this key for this scope; None when it is absent or not to be trusted."""
        path = self._path(scope, key)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                text = file.read(_LONGEST + 1)
        except OSError:  # never written, or not readable: both mean that nothing is known
            return None
        value = _trusted(text, scope, key)
        if value is None:
            log.debug("ignored cache entry %s: damaged, or not memopt's", path)
        return value

    def put(self, scope: str, key: str, value: Record) -> bool:
        """Keep a record, replacing an older one.

        Args:
            scope: what it holds for, such as a device with its versions.
            key: what it is the value of.
            value: what JSON can hold: finite numbers, strings, booleans, None, lists, dictionaries.

        Returns:
            Whether it was written; a folder that cannot be written is no error.
        """
        path = self._path(scope, key)
        if path is None:
            return False
        entry = {"format": FORMAT, "scope": scope, "key": key, "value": value}
        text = json.dumps({**entry, "digest": _digest(entry)}, allow_nan=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, text)
        except OSError as error:
            log.info("nothing is cached below %s: %s", path.parent, error)
            return False
        return True

    def _path(self, scope: str, key: str) -> Path | None:
        folder = cache_dir()
        if folder is None:
            return None
        return folder / self.kind / _hash(scope)[:16] / f"{_hash(key)[:32]}.json"


def _trusted(text: bytes, scope: str, key: str) -> Record | None:
    if len(text) > _LONGEST:
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or set(entry) != {"format", "scope", "key", "value", "digest"}:
        return None
    digest = entry.pop("digest")
    if (entry["format"], entry["scope"], entry["key"]) != (FORMAT, scope, key) or digest != _digest(entry):
        return None
    return entry["value"] if isinstance(entry["value"], dict) else None


def _digest(entry: Record) -> str:
    return _hash(json.dumps(entry, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _write_whole(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
