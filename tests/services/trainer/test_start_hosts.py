"""Tests what the hosts of a trainer compare before they load anything."""

import dataclasses
from pathlib import Path

import pytest

import services.trainer.start_hosts as hosts
from protocol.errors import SettingsError
from services.settings.load import load_settings
from services.settings.sections import Settings
from services.trainer.start_hosts import check_host, host_settings, run_on_hosts
from tests.integration.loop import settings_for
from trainer.hosts.meeting import HostFacts
from trainer.hosts.place import HostPlace
from trainer.random_model import build_scratch

SECOND = HostPlace(1, 2, "127.0.0.1", 29400, "a test")


def prepared(run_dir: Path, *overrides: str) -> Settings:
    """Settings of a run whose model is there."""
    settings = settings_for(run_dir, "stragglers.toml", *overrides)
    assert settings.model.scratch is not None
    build_scratch(settings.model.scratch, settings.model_dir)
    return settings


def facts(settings: Settings, number: int, marker: str = "") -> HostFacts:
    return HostFacts(f"name-{number}", 100 + number, marker, host_settings(settings))


def refusal(settings: Settings, first: HostFacts) -> str:
    with pytest.raises(SettingsError) as caught:
        check_host(settings, SECOND, facts(settings, 1), first)
    return str(caught.value)


def test_hosts_with_a_common_run_directory_go_together(tmp_path: Path) -> None:
    settings = prepared(tmp_path)
    (tmp_path / "hosts-1f").touch()
    other = dataclasses.replace(settings.trainer, threads=7)
    first = facts(dataclasses.replace(settings, trainer=other), 0, "hosts-1f")
    check_host(settings, SECOND, facts(settings, 1), first)


def test_a_host_without_the_run_directory_of_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SEE_S", 0.0)
    settings = prepared(tmp_path)
    said = refusal(settings, facts(settings, 0, "hosts-1f"))
    assert said.startswith(
        "setting run.dir: host 1 (name-1) does not see the directory of host 0 (name-0): "
        f"there is no {tmp_path}/hosts-1f; put it on a file system that all hosts"
    )


@pytest.mark.parametrize("transport", ["disk", "http", "nccl"])
def test_a_host_that_does_not_see_the_versions_of_the_first_is_refused(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "SEE_S", 0.0)
    words = (f"weights.transport={transport}",)
    first = prepared(tmp_path, *words, f"weights.directory={tmp_path}/mount-a/made")
    link, other = tmp_path / "link", f"weights.directory={tmp_path}/mount-b"
    with hosts._marker(first, HostPlace(0, 2, "127.0.0.1", 29400, "a test")) as marker:
        given = facts(first, 0, marker)
        if transport == "nccl":  # no rank writes there
            check_host(prepared(tmp_path, *words, other), SECOND, facts(first, 1), given)
            return
        said = refusal(prepared(tmp_path, *words, other), given)
        assert said.startswith(
            "setting weights.directory: host 1 (name-1) does not see the directory of host"
        )
        link.symlink_to(tmp_path / "mount-a")
        own = prepared(tmp_path, *words, f"weights.directory={link}/made")
        check_host(own, SECOND, facts(own, 1), given)
    assert not list(tmp_path.rglob("hosts-*"))


def test_a_host_with_another_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    settings = prepared(tmp_path)
    other = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, lr=0.5))
    said = refusal(settings, facts(other, 0))
    assert said.startswith(
        "setting optimizer.lr: 1e-05 on host 1 (name-1), 0.5 on host 0 (name-0); start all"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("weights.transport=nccl", "setting weights.transport: 'shm' on host 1 (name-1), 'nccl' on host 0"),
        ("engine.dtype=float32", "setting engine.dtype: 'bfloat16' on host 1 (name-1), 'float32' on host 0"),
    ],
)
def test_a_host_that_would_publish_its_part_in_another_way_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    same = ("weights.transport=shm", "engine.dtype=bfloat16")
    first = facts(prepared(tmp_path, *same, override), 0)
    assert refusal(prepared(tmp_path, *same), first).startswith(said)


def test_a_host_may_publish_from_an_address_of_its_own(tmp_path: Path) -> None:
    settings = prepared(tmp_path, "weights.host=127.0.0.2")
    (tmp_path / "hosts-1f").touch()
    check_host(settings, SECOND, facts(settings, 1), facts(prepared(tmp_path), 0, "hosts-1f"))


def test_a_host_with_another_model_is_refused(tmp_path: Path) -> None:
    first = facts(prepared(tmp_path / "a"), 0)
    settings = prepared(tmp_path / "b")
    config = settings.model_dir / "config.json"
    config.write_text(config.read_text() + " ")
    assert refusal(settings, first).startswith("the model's files: '")


def test_a_host_without_the_model_is_refused(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "stragglers.toml")
    with pytest.raises(SettingsError, match=r"no model in "):
        host_settings(settings)


def test_hosts_without_a_run_directory_do_not_start(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "none", "stragglers.toml")
    with pytest.raises(SettingsError, match="no run directory"):
        run_on_hosts(settings, SECOND)


def test_several_hosts_and_turns_on_a_gpu_exclude_each_other() -> None:
    words = (
        "cluster.nodes=2", "cluster.rendezvous=a:1", "parallel.data_parallel_size=2", "engine.name=hf",
        "colocated.enabled=true",
    )  # fmt: skip
    with pytest.raises(SettingsError, match=r"colocated.enabled: .* cluster.nodes is 2; give engines"):
        load_settings(None, words, {})


def test_each_host_has_its_share_of_the_ranks() -> None:
    words = ("parallel.data_parallel_size=8", "cluster.nodes=2", "cluster.rendezvous=a:1")
    settings = load_settings(None, words, {})
    assert (settings.parallel.world_size, settings.ranks_per_host) == (8, 4)
    assert load_settings(None, words[:1], {}).ranks_per_host == 8
