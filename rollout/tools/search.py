"""Searches a local index of passages: a SQLite file with full-text search (FTS5), ranked by BM25.

python -m rollout.tools.search build INDEX DOCUMENTS.jsonl      lines {"text": ..., "title": ...}
python -m rollout.tools.search ask INDEX QUERY
"""

import asyncio
import contextlib
import json
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.atomic_file import written_aside
from rollout.command_line import errors_as_exit_code
from rollout.tools.base import Tool

WORDS = 32
"""Maximum number of query words to search for."""
STEPS = 20_000_000
"""SQLite VM instructions after which a query is aborted; about a second."""
CREATE = "CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')"
FIND = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
FIRST = "SELECT title, text FROM passages LIMIT 1"
BUILD = "build it with `python -m rollout.tools.search build`"


class SearchTool(Tool):
    """Tool `search`: returns the best matching passages."""

    def __init__(self, index: Path, results: int, characters: int) -> None:
        """Open an index.

        Args:
            index: file written by `build_index`.
            results: passages per answer.
            characters: maximum length of each passage.

        Raises:
            SettingsError: the index is missing, invalid or empty.
        """
        self._index, self._results, self._characters = index, results, characters
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tool-search")
        self._find("index")
        if not self._rows(FIRST):
            raise SettingsError(f"search index {index} has no passages; {BUILD}")

    async def run(self, text: str) -> str:
        """Return the best passages. A query ends after `STEPS`, even if the call was cancelled."""
        found = await asyncio.wrap_future(self._threads.submit(self._find, text))
        return "\n\n".join(found) or "nothing found"

    def _find(self, query: str) -> list[str]:
        words = re.findall(r"\w+", query)[:WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        try:
            rows = self._rows(FIND, match, self._results)
        except TimeoutError:
            return ["error: the search took too long; use fewer words"]
        return [f"{title}: {text}"[: self._characters] if title else text[: self._characters]
                for title, text in rows]  # fmt: skip

    def _rows(self, query: str, *values: str | int) -> list[tuple[str, str]]:
        """Return the rows of a query. Raises TimeoutError after `STEPS`."""
        try:
            with contextlib.closing(_opened(self._index)) as database:
                return database.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            if "interrupted" in str(error):
                raise TimeoutError from None
            raise SettingsError(f"search index {self._index}: {error}; {BUILD}") from None


def build_index(index: Path, documents: Iterable[tuple[str, str]]) -> int:
    """Write an index of passages (title or "", text); return their number.

    Raises:
        SettingsError: the file exists, or there are no passages. No file remains, also after other errors.
    """
    if index.exists():
        raise SettingsError(f"search index {index} exists; remove it, or give another name")
    try:
        with written_aside(index) as aside, contextlib.closing(sqlite3.connect(aside)) as database, database:
            database.execute(CREATE)
            database.executemany("INSERT INTO passages VALUES (?, ?)", documents)
            count: int = database.execute("SELECT count(*) FROM passages").fetchone()[0]
            if not count:
                raise SettingsError(f"search index {index} is not written: the documents have no passages")
    except sqlite3.Error as error:
        raise SettingsError(f"search index {index} is not written: {error}") from None
    return count


def read_documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each line of a JSONL file.

    Raises:
        SettingsError: a line is not a JSON object with `text`; the message names the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                title, text = str(row.get("title", "")), str(row["text"])
                f"{title}{text}".encode()  # SQLite stores no lone surrogates
            except (ValueError, KeyError, AttributeError, RecursionError):
                raise SettingsError(f"{path}:{number}: not a JSON object with a field 'text'") from None
            yield title, text


def _opened(index: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    database.set_progress_handler(lambda: 1, STEPS)
    return database


@errors_as_exit_code
def main(arguments: list[str]) -> int:
    """Run `python -m rollout.tools.search`; return the exit code."""
    match arguments:
        case ["build", index, documents]:
            print(f"{build_index(Path(index), read_documents(Path(documents)))} passages")
            return 0
        case ["ask", index, *words] if words:
            print(asyncio.run(SearchTool(Path(index), 3, 500).run(" ".join(words))))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
