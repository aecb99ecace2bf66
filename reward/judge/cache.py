"""Caches judges' answers on disk by request, so each question is asked once."""

import sqlite3
import threading
from pathlib import Path

from protocol.errors import SettingsError

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request BLOB NOT NULL UNIQUE, text TEXT NOT NULL
)
"""
BUSY_S = 5.0
"""Timeout for a write lock held by another process, seconds."""
TRIM_EVERY = 256
"""Number of writes between two size checks."""


class AnswerCache:
    """SQLite cache of answers, shared by processes of a host. Methods block, so call them in a thread."""

    def __init__(self, path: str, max_answers: int) -> None:
        """Open or create the database.

        Args:
            path: path of the database file.
            max_answers: maximum number of answers.

        Raises:
            SettingsError: the database cannot be opened. The message names the file.
        """
        self._max_answers, self._written = max_answers, 0
        self._lock = threading.Lock()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"verifier judge: option cache: {path}: {error}") from None

    def get(self, request: bytes) -> str | None:
        """Return the cached answer to a request, given its digest. Raises sqlite3.Error."""
        with self._lock:
            row = self._database.execute("SELECT text FROM answers WHERE request = ?", (request,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: bytes, text: str) -> None:
        """Store an answer, and periodically delete the oldest. Raises sqlite3.Error."""
        with self._lock:
            self._database.execute(
                "INSERT OR REPLACE INTO answers (request, text) VALUES (?, ?)", (request, text)
            )
            self._written += 1
            if self._written % TRIM_EVERY == 0 or self._max_answers < TRIM_EVERY:
                self._database.execute(
                    "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ?",
                    (self._max_answers,),
                )

    def close(self) -> None:
        """Close the database."""
        self._database.close()
