"""Names of the hub in a run: pinned at its first start, recorded, and the same at every later one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.host.hub import snapshot_dir
from services.prepare import prepare
from services.settings.hub import (
    FILE,
    RECORD_NAME,
    fetch_critic,
    fetch_frozen,
    fetch_model,
    pin_names,
    read_record,
    record_pins,
)
from services.settings.load import dump_settings, load_settings, run_settings
from services.settings.sections import Settings
from tests.data_sets import write_gsm8k, write_model
from tests.hub_server import HubServer, files_of
from tests.trainer.backends.quantised_models import describe, save_fp8
from trainer.backends.plain_copy import quantization_of
from trainer.roles.config import CriticConfig, ReferenceConfig, TeacherConfig

pytestmark = pytest.mark.xdist_group("hub")  # one fixture for the module

MODEL, DATA = "some-org/tiny", "openai/gsm8k"
TABLES = f"""
[run]
name = "pinned"
[model]
path = "{MODEL}"
[prompts]
source = "hf"
path = "{DATA}"
subset = "main"
prompt_field = "question"
answer_pattern = "#### (.+)"
[[eval.sets]]
name = "test"
split = "test"
[[eval.sets]]
name = "old"
split = "test"
revision = "v1"
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(write_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer().serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        data = files_of(write_gsm8k(tmp_path / "gsm8k"))
        server.repository("model", MODEL).commit(tiny)
        server.repository("dataset", DATA).commit({**data, "extra.json.gz": b""}, "v1")
        server.repository("dataset", DATA).commit(data)
        yield server


@pytest.fixture
def asked(tmp_path: Path) -> Settings:
    path = tmp_path / "run.toml"
    path.write_text(TABLES)
    return load_settings(str(path), [f"run.dir={tmp_path / 'run'}"], environ={})


def started(asked: Settings) -> Settings:
    """What a start does of it, without a ledger."""
    pinned = pin_names(asked)
    asked.run_dir.mkdir(exist_ok=True)
    dump_settings(pinned, asked.run_dir / "settings.json")
    record_pins(asked, pinned)
    return pinned


def test_names_become_commits_and_are_recorded(hub: HubServer, asked: Settings) -> None:
    model, data = hub.repository("model", MODEL).branches, hub.repository("dataset", DATA).branches
    pinned = started(asked)
    assert pinned.model.revision == model["main"]
    assert pinned.prompts.revision == data["main"]
    assert [each.revision for each in pinned.eval.sets] == [data["main"], data["v1"]]
    assert read_record(asked.run_dir / FILE, RECORD_NAME) == {
        f"model {MODEL} main": model["main"],
        f"dataset {DATA} main": data["main"],
        f"dataset {DATA} v1": data["v1"],
    }
    assert run_settings(asked.run_dir).eval.sets == pinned.eval.sets


def test_models_that_are_not_trained_are_pinned_and_fetched_too(hub: HubServer, asked: Settings) -> None:
    named = replace(asked, teacher=TeacherConfig(path=MODEL), reference=ReferenceConfig(path="/models/here"))
    pinned = started(named)
    commit = hub.repository("model", MODEL).branches["main"]
    assert (pinned.teacher.revision, pinned.reference.revision) == (commit, "")
    assert [each.revision for each in pinned.eval.sets] == [
        each.revision for each in started(asked).eval.sets
    ]
    assert pinned.role_dir("teacher") == pinned.model_dir
    with pytest.raises(SettingsError, match=r"reference\.path: no config\.json in /models/here"):
        fetch_frozen(pinned)
    alone = replace(pinned, reference=ReferenceConfig())
    assert fetch_frozen(alone) == {"teacher": pinned.model_dir}
    assert fetch_frozen(asked) == {}


def test_a_critic_of_the_hub_is_pinned_and_fetched_too(hub: HubServer, asked: Settings) -> None:
    ppo = replace(asked, algorithm=replace(asked.algorithm, name="ppo"))
    named = replace(ppo, critic=CriticConfig(path=MODEL))
    with pytest.raises(SettingsError, match=rf"critic\.path {MODEL} has no commit yet"):
        fetch_critic(named)
    pinned = started(named)
    assert pinned.critic.revision == hub.repository("model", MODEL).branches["main"]
    assert fetch_critic(pinned) == pinned.critic_dir == pinned.model_dir
    assert fetch_critic(started(ppo)) == pinned.model_dir
    with pytest.raises(SettingsError, match=r"critic\.path: no config\.json in /models/here"):
        fetch_critic(replace(ppo, critic=CriticConfig(path="/models/here")))


def test_a_start_fetches_and_a_later_one_needs_no_network(
    hub: HubServer, asked: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(started(asked))
    assert (first.prompts, fetch_model(pin_names(asked)).name) == (None, pin_names(asked).model.revision)
    hub.repository("model", MODEL).commit({"config.json": b"another model"})
    hub.repository("dataset", DATA).commit({"README.md": b"other data"})
    hub.use(monkeypatch, tmp_path / "cache", offline=True)
    hub.requests.clear()
    assert prepare(pin_names(asked)) == first  # with the configuration file
    assert prepare(run_settings(asked.run_dir)) == first  # as the services read it
    assert hub.requests == []


def test_another_host_fetches_the_same_commit(
    hub: HubServer, asked: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = started(asked)
    hub.repository("model", MODEL).commit({"config.json": b"another model"})
    hub.use(monkeypatch, tmp_path / "cache of another host")
    directory = fetch_model(run_settings(asked.run_dir))
    assert directory == snapshot_dir("model", MODEL, pinned.model.revision)  # type: ignore[arg-type]
    assert "another host" in str(directory)
    assert (directory / "tokenizer.json").is_file()


def test_a_refusal_writes_nothing(hub: HubServer, asked: Settings) -> None:
    del hub.repositories["dataset", DATA]
    with pytest.raises(SettingsError, match=f"dataset '{DATA}'"):
        started(asked)
    assert not asked.run_dir.exists()


def test_a_model_without_safetensors_is_refused(hub: HubServer, asked: Settings) -> None:
    hub.repository("model", MODEL).commit({"config.json": b"{}", "pytorch_model.bin": b""})
    with pytest.raises(SettingsError, match="has no safetensors"):
        fetch_model(pin_names(asked))


def test_local_settings_are_left_as_they_are(tmp_path: Path) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}"], environ={})
    assert pin_names(settings) == settings
    record_pins(settings, settings)
    assert list(tmp_path.iterdir()) == []


def test_a_quantised_model_is_read_through_a_copy_in_the_run_directory(tmp_path: Path) -> None:
    source = save_fp8(tmp_path / "fp8")
    found = load_settings(
        None,
        [f"model.path={source}", f"teacher.path={source}", f"run.dir={tmp_path / 'run'}"],
        environ={},
    )
    assert found.model_dir == tmp_path / "run/model"
    assert fetch_model(found) == found.model_dir
    assert fetch_frozen(found) == {"teacher": tmp_path / "run/model_teacher"}
    assert quantization_of(found.model_dir) is None
    written = (found.model_dir / "model.safetensors").stat().st_mtime_ns
    assert fetch_model(found) == found.model_dir
    assert (found.model_dir / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model", "model_teacher"]


def test_a_model_in_other_bits_is_refused_by_the_name_of_its_method(tmp_path: Path) -> None:
    source = save_fp8(tmp_path / "fp8")
    describe(source, quant_method="gptq", bits=4)
    found = load_settings(None, [f"model.path={source}", f"run.dir={tmp_path / 'run'}"], environ={})
    with pytest.raises(SettingsError, match=r"setting model\.path: .*'gptq'; checkpoints of fp8 and mxfp4"):
        fetch_model(found)
    assert not (tmp_path / "run").exists()


def test_without_a_commit_a_model_has_no_place(asked: Settings) -> None:
    with pytest.raises(SettingsError, match=f"model.path {MODEL} has no commit yet"):
        asked.model_dir  # noqa: B018


def test_a_revision_is_for_the_hub_alone(tiny: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in tiny.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SettingsError, match=r"model\.revision: 'main' is for a model of the hub"):
        load_settings(None, [f"model.path={tmp_path}", "model.revision=main"], environ={})
    with pytest.raises(SettingsError, match=r"model\.path: no config\.json in .*/nowhere"):
        load_settings(None, ["model.path=nowhere"], environ={})


def test_a_damaged_record_is_named(hub: HubServer, asked: Settings) -> None:
    started(asked)
    (asked.run_dir / FILE).write_text("{")
    with pytest.raises(SettingsError, match=r"hub\.json: .*restore it, or delete it"):
        pin_names(asked)


def test_a_record_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.symlink_to(path)
    with pytest.raises(SettingsError, match=f"^{path}: Too many levels of symbolic links; it records the "):
        read_record(path, RECORD_NAME)
