"""The tool `search`: passages by rank, and queries of any characters."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import SettingsError
from rollout.tools.search import CREATE, SearchTool, build_index, main, read_documents

PASSAGES = [
    ("Paris", "The capital of France lies on the Seine."),
    ("Berlin", "The capital of Germany lies on the Spree."),
    ("", "Rivers carry water."),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "a b?c#.db"
    assert build_index(path, PASSAGES) == 3
    return path


async def test_the_best_passages_are_found_first(index: Path) -> None:
    tool = SearchTool(index, 2, 26)
    assert (await tool.run("river")) == "Rivers carry water."
    assert (await tool.run("capital of Germany?")).splitlines()[0] == "Berlin: The capital of Ger"
    assert (await tool.run("volcano")) == "nothing found"
    assert (await tool.run('"*')) == "nothing found"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text(max_size=40))
def test_no_query_is_a_syntax_error(index: Path, query: str) -> None:
    assert len(SearchTool(index, 3, 100)._find(query)) <= 3


def test_an_index_is_built_and_asked_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, index = tmp_path / "documents.jsonl", str(tmp_path / "index.db")
    documents.write_text('{"text": "Rivers carry water.", "title": "River"}\n{"text": "b"}\n')
    assert main(["build", index, str(documents)]) == 0
    assert main(["ask", index, "water", "river"]) == 0
    assert capsys.readouterr().out == "2 passages\nRiver: Rivers carry water.\n"
    assert main(["ask", index]) == 2


def test_file_without_an_index_or_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"search index .*absent\.db: unable to open"):
        SearchTool(tmp_path / "absent.db", 3, 100)
    assert not (tmp_path / "absent.db").exists()
    other = tmp_path / "other.db"
    other.write_text("text that is no database at all")
    with pytest.raises(SettingsError, match="file is not a database"):
        SearchTool(other, 3, 100)
    with pytest.raises(SettingsError, match="exists; remove it"):
        build_index(other, [])
    other.write_text('{"text": "a"}\n[]\n')
    with pytest.raises(SettingsError, match=r"other\.db:2: not a JSON object"):
        list(read_documents(other))


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        (b'{"text": "a"}\n{"title": "b"}\n', "documents.jsonl:2: not a JSON object with a field 'text'"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "documents.jsonl:2: not a JSON"),
        (b'{"text": "\\ud800"}\n', "documents.jsonl:1: not a JSON"),
        (b"", "index.db is not written: the documents have no passages"),
    ],
)
def test_documents_that_cannot_be_indexed_leave_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: bytes, says: str
) -> None:
    path, index = tmp_path / "documents.jsonl", str(tmp_path / "index.db")
    path.write_bytes(documents)
    for _ in range(2):
        assert main(["build", index, str(path)]) == 2
        assert says in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"text": "Rivers carry water."}\n')
    assert main(["build", index, str(path)]) == 0


def test_an_index_without_passages_is_not_opened(tmp_path: Path) -> None:
    index = tmp_path / "index.db"
    with contextlib.closing(sqlite3.connect(index)) as database, database:
        database.execute(CREATE)
    with pytest.raises(SettingsError, match=r"index\.db has no passages; build it with `python -m"):
        SearchTool(index, 3, 100)


def test_missing_files_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index, absent = str(tmp_path / "index.db"), str(tmp_path / "absent.jsonl")
    assert main(["build", index, absent]) == 2
    assert capsys.readouterr().err == f"{absent}: No such file or directory\n"
    assert main(["ask", index, "river"]) == 2
    assert capsys.readouterr().err.startswith(f"search index {index}: unable to open")
    assert list(tmp_path.iterdir()) == []
