"""CompileCache: finished work of this version of memopt and torch, kept on disk by its key."""

from __future__ import annotations

import abc
import zlib
from typing import Any, ClassVar, Generic, TypeVar

from memopt.memory.cost.disk import Store
from memopt.step.keys import versions

T = TypeVar("T")


class CompileCache(abc.ABC, Generic[T]):
    """Entries of one kind, below the folder for caches; a subclass says how one is written and read.

    Attributes:
        kind: the name of the folder.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        """Nothing is read or made yet."""
        self._store, self._scope = Store(self.kind), versions()

    def get(self, key: str) -> T | None:
        """What was put under this key; None when it is absent or damaged."""
        record = self._store.get(self._scope, key)
        try:
            return None if record is None else self.decoded(dict(record))
        except (KeyError, TypeError, ValueError, zlib.error):
            return None

    def put(self, key: str, entry: T) -> bool:
        """Keep an entry in place of an older one; return whether it was written."""
        return self._store.put(self._scope, key, self.encoded(entry))

    @staticmethod
    @abc.abstractmethod
    def encoded(entry: T) -> dict[str, Any]:
        """The entry in what JSON can hold."""

    @staticmethod
    @abc.abstractmethod
    def decoded(record: dict[str, Any]) -> T:
        """The entry of a record, which may hold anything.

        Raises:
            KeyError, TypeError, ValueError, zlib.error: it is none.
        """
