"""Data sets: by a name on the hub and as local directories of the same form."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig
from rollout.prompts.registry import make_source
from tests.data_sets import sums, write_gsm8k, write_parquet
from tests.hub_server import HubServer, files_of

NAME = "openai/gsm8k"
CONFIG = PromptConfig(source="hf", subset="main", prompt_field="question", answer_pattern="#### (.+)")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_gsm8k(tmp_path / "gsm8k")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer().serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        yield server


def test_a_name_on_the_hub_and_a_local_directory_give_the_same_stream(hub: HubServer, local: Path) -> None:
    hub.repository("dataset", NAME).commit(files_of(local))
    by_name, by_path = (make_source(replace(CONFIG, path=path)) for path in (NAME, str(local)))
    assert [by_name.at(i) for i in range(45)] == [by_path.at(i) for i in range(45)]
    assert by_name.fingerprint == by_path.fingerprint
    assert {by_name.at(i).metadata["answer"] for i in range(20)} == {str(2 * i + 1) for i in range(20)}


def test_a_revision_is_used(hub: HubServer, local: Path, tmp_path: Path) -> None:
    first = hub.repository("dataset", NAME).commit(files_of(local))
    hub.repository("dataset", NAME).commit(files_of(write_gsm8k(tmp_path / "more", train=30)))
    texts = [
        set(make_source(replace(CONFIG, path=NAME, revision=revision)).trained_texts())
        for revision in (first, "main")
    ]
    assert [len(each) for each in texts] == [20, 30]


def test_held_out_sets_are_other_splits_and_subsets(local: Path) -> None:
    config = replace(CONFIG, path=str(local))
    sets = (HeldOutConfig(name="test", split="test"), HeldOutConfig(name="few", split="test", limit=3))
    found = held_out_sets(make_source(config), config, sets, 200)
    assert {name: len(prompts) for name, prompts in found.items()} == {"test": 8, "few": 3}
    assert found["test"][0].metadata["answer"] == "2,000,001"
    path = write_parquet(local.parent / "other.parquet", sums(2, 500))
    other = held_out_sets(
        make_source(config), config, (HeldOutConfig(name="other", path=str(path)),), 200
    )  # with a path of its own it has neither subset nor split of [prompts]
    assert len(other["other"]) == 2


def test_a_directory_without_a_card_has_the_splits_of_its_file_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "flat/train.parquet", sums(5))
    write_parquet(tmp_path / "flat/test.parquet", sums(3, 100))
    config = replace(CONFIG, path=str(tmp_path / "flat"), subset="")
    assert len(list(make_source(config).trained_texts())) == 5
    assert len(list(make_source(replace(config, split="test")).trained_texts())) == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"split": "trian"}, r"Unknown split \"trian\". Should be one of \['train', 'test'\]"),
        ({"subset": ""}, r"Please pick one among the available configs: \['main', 'socratic'\]"),
        ({"subset": "mian"}, r"'mian' not found. Available: \['main', 'socratic'\]"),
        ({"revision": "v2"}, r"setting prompts\.revision: .* is local"),
        ({"prompt_field": "prompt"}, "row 0: no field 'prompt', it has answer, question"),
        ({"held_out_path": "openai/other"}, r"held_out_path: 'openai/other' does not exist.*eval\.sets"),
        ({"path": "/nowhere"}, r"'/nowhere' does not exist.*data set of the hub"),
    ],
)
def test_unreadable_data_set_is_said(local: Path, change: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_source(replace(CONFIG, **{"path": str(local), **change}))  # type: ignore[arg-type]


def test_a_file_has_no_subsets(local: Path) -> None:
    path = next(local.glob("main/train*"))
    with pytest.raises(SettingsError, match=r"prompts\.subset: .* has no subsets"):
        make_source(replace(CONFIG, path=str(path)))


def test_a_data_set_that_the_hub_does_not_have_is_said(hub: HubServer) -> None:
    with pytest.raises(SettingsError, match=f"dataset '{NAME}' .*no such dataset"):
        make_source(replace(CONFIG, path=NAME))
