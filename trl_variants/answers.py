"""Answers kept on disk under the hash of what was asked: one sqlite file, which several processes may use."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping

from .errors import VariantError


class AnswerFile:
    """Bytes by name. Raises VariantError where the file cannot be used; `whose` says in it whose cache that is."""

    def __init__(self, path: str, whose: str):
        self.file = os.path.abspath(os.path.expanduser(path))
        try:
            os.makedirs(os.path.dirname(self.file), exist_ok=True)
            with self._open() as file:
                file.execute("CREATE TABLE IF NOT EXISTS answers (name TEXT PRIMARY KEY, answer BLOB NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise VariantError(f"{whose} cache {self.file} cannot be used ({error}): name another file") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.file, timeout=120)  # other processes write too
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """The answers that are there."""
        found = {}
        with self._open() as file:
            for name in names:
                row = file.execute("SELECT answer FROM answers WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    found[name] = row[0]
        return found

    def write(self, answers: Mapping[str, bytes]) -> None:
        """Adds answers; one that is there already stays as it is."""
        with self._open() as file:
            file.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", list(answers.items()))
