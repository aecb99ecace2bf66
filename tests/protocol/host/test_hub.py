"""Names of the hub: what is one, what is fetched, and what is said where it cannot be. The client is real."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.host.hub import Kind, fetch, is_commit, is_hub_name, resolve_commit, snapshot_dir
from tests.hub_server import HubServer

MODEL = "some-org/Tiny-1.5B_v2"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"the same weights",
    "onnx/model.safetensors": b"other weights",
    "consolidated.safetensors": b"the same weights",
    "README.md": b"about",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer().serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        yield server


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (MODEL, True),
        ("openai/gsm8k", True),
        ("gpt2", False),
        ("", False),
        ("./openai/gsm8k", False),
        ("/openai/gsm8k", False),
        ("a/b/c", False),
        ("a/b/", False),
        ("a/../b", False),
        ("../b", False),
        ("a/b--c", False),
        ("a b/c", False),
        ("data/train.jsonl", False),
        ("data/train.parquet", False),
    ],
)
def test_a_hub_name_is_an_owner_and_a_name(text: str, wanted: bool) -> None:
    assert is_hub_name(text) is wanted


def test_existing_path_is_not_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("openai/gsm8k")
    (tmp_path / "openai/gsm8k").mkdir(parents=True)
    assert not is_hub_name("openai/gsm8k")


def test_a_model_is_fetched_once_without_other_forms_of_its_weights(hub: HubServer) -> None:
    commit = hub.repository("model", MODEL).commit(FILES)
    assert resolve_commit(Kind.MODEL, MODEL, "") == commit
    directory = fetch(Kind.MODEL, MODEL, commit)
    assert directory == snapshot_dir(Kind.MODEL, MODEL, commit)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    asked = len(hub.requests)
    assert fetch(Kind.MODEL, MODEL, commit) == directory
    assert len(hub.requests) == asked


def test_a_data_set_is_fetched_with_its_folders(hub: HubServer) -> None:
    files = {"main/train-0.parquet": b"rows", "README.md": b"about", "load.py": b"code"}
    commit = hub.repository("dataset", "openai/gsm8k").commit(files)
    directory = fetch(Kind.DATASET, "openai/gsm8k", resolve_commit(Kind.DATASET, "openai/gsm8k", "main"))
    assert directory.name == commit
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == {"main/train-0.parquet", "README.md"}


def test_a_branch_moves_and_a_commit_does_not(hub: HubServer) -> None:
    first = hub.repository("model", MODEL).commit(FILES)
    tag = hub.repository("model", MODEL).commit({**FILES, "config.json": b"{2}"}, "v2")
    second = hub.repository("model", MODEL).commit({**FILES, "config.json": b"{3}"})
    assert [resolve_commit(Kind.MODEL, MODEL, name) for name in ("", "main", "v2", first)] == [
        second,
        second,
        tag,
        first,
    ]
    assert is_commit(first)
    assert (fetch(Kind.MODEL, MODEL, first) / "config.json").read_bytes() == b"{}"


def test_offline_the_cache_is_used(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import snapshot_download

    commit = hub.repository("model", MODEL).commit(FILES)
    snapshot_download(MODEL)  # as by any other program of this host
    hub.use(monkeypatch, tmp_path / "cache", offline=True)
    asked = len(hub.requests)
    assert resolve_commit(Kind.MODEL, MODEL, "main") == commit
    assert f"hub.cached model={MODEL} commit={commit}" in caplog.text
    assert (fetch(Kind.MODEL, MODEL, commit) / "model.safetensors").read_bytes() == b"weights"
    assert len(hub.requests) == asked


def test_offline_without_the_files_the_name_and_the_remedy_are_said(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repository("model", MODEL).commit(FILES)
    hub.use(monkeypatch, tmp_path / "cache", offline=True)
    wanted = rf"model '{MODEL}' \(revision main\): .*HF_HUB_OFFLINE is set.*hf download {MODEL}` there"
    with pytest.raises(SettingsError, match=wanted):
        resolve_commit(Kind.MODEL, MODEL, "")
    with pytest.raises(SettingsError, match=rf"\(revision {commit}\): .*HF_HUB_OFFLINE is set"):
        fetch(Kind.MODEL, MODEL, commit)
    assert hub.requests == []


def test_without_a_network_the_name_and_the_remedy_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer().serving() as gone:
        gone.use(monkeypatch, tmp_path / "cache")
    wanted = rf"data set 'openai/gsm8k' .*{gone.url}: .*hf download openai/gsm8k --repo-type dataset"
    with pytest.raises(SettingsError, match=wanted.replace("data set", "dataset")):
        resolve_commit(Kind.DATASET, "openai/gsm8k", "")


def test_missing_hub_name_is_said(hub: HubServer) -> None:
    hub.repository("model", MODEL).commit(FILES)
    hub.gated.add("meta/gated")
    for name, revision, why in (
        ("nobody/nothing", "", "no such model that you may read"),
        (MODEL, "v9", r"revision v9\): .*no such branch"),
        ("meta/gated", "", r"terms must be accepted.*HF_TOKEN"),
    ):
        with pytest.raises(SettingsError, match=why):
            resolve_commit(Kind.MODEL, name, revision)
    with pytest.raises(SettingsError, match="no such branch, tag or commit"):
        fetch(Kind.MODEL, MODEL, "0" * 40)
