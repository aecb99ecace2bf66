"""Tests what `tether` answers to wrong settings.

Exit code 2, one line that names what is wrong, no traceback, and no process left over.
"""

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import processes_of, tether, tether_here
from tests.integration.loop import ROOT

CONFIG = str(ROOT / "deploy/configs/stragglers.toml")


def refused(run_dir: Path, *arguments: str, run: Any = tether_here, **variables: str) -> str:
    """Run `tether up`, check how it ends, and return its last line.

    `run`: `tether` in a process of its own, or here, which is as good where nothing is started.
    """
    result = run("up", *arguments, "--run-dir", str(run_dir), **variables)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert processes_of(run_dir) == []
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "culprit"),
    [
        ("bound.max_stalenes=2", "did you mean 'max_staleness'"),
        ("bund.max_staleness=2", "did you mean 'bound'"),
        ("bound.max_staleness=-1", "bound.max_staleness: -1 is not between 0 and 1000"),
        ("optimizer.lr=nan", "optimizer.lr: nan is not between 0 and 1000"),
        ("bound.staleness_policy=maybe", "bound.staleness_policy"),
        ("engine.name=vlm", "did you mean 'vllm'"),
        ("trainer.backend=megatrn", "did you mean 'megatron'"),
        ("algorithm.name=gprx", "algorithm.name"),
        ("run.name=../up", "run name"),
        ("nonsense", "section.key=value"),
        ('bus.host="0.0.0.0"', "make keys with `tether keys DIR` and set bus.curve_dir"),
        ("bus.curve_dir=/nowhere", "cannot read /nowhere/server.key_secret"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, override: str, culprit: str) -> None:
    assert culprit in refused(tmp_path, CONFIG, "--set", override)


def test_an_unknown_variable_is_named(tmp_path: Path) -> None:
    line = refused(tmp_path, CONFIG, run=tether, TETHER_MAX_STALENES="2")
    assert "did you mean 'TETHER_MAX_STALENESS'" in line


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.toml" in refused(tmp_path, str(tmp_path / "nowhere.toml"))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\npath = "{tmp_path}/no-model"\n[prompts]\npath = "deploy/examples/max3/prompts.jsonl"\n'
    )
    assert "no-model" in refused(tmp_path / "run", str(config))


def test_an_unreachable_ledger_is_named_without_its_password(tmp_path: Path) -> None:
    line = refused(
        tmp_path, CONFIG, "--set", "ledger.retry_s=0.5", "--set", "ledger.timeout_s=1",
        run=tether, TETHER_REDIS_URL="redis://user:secret@127.0.0.1:1/0",
    )  # fmt: skip
    assert "127.0.0.1:1" in line
    assert "secret" not in line


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(tmp_path, CONFIG, "--set", f"monitor.port={port}")


def test_a_bad_prompt_line_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": 2\n')
    line = refused(
        tmp_path / "run", CONFIG, "--set", f'prompts.path="{prompts}"', "--set", "prompts.held_out=0"
    )
    assert f"{prompts}:2" in line


@pytest.mark.parametrize("command", ["status", "verify", "eval"])
def test_a_directory_without_a_run_is_named(tmp_path: Path, command: str) -> None:
    result = tether_here(command, tmp_path)
    assert result.returncode == 2
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("value", "says"), [("-1", "-1 is not between 0 and"), ("-x", "'-x' is not a whole")]
)
def test_a_negative_bound_is_no_option(tmp_path: Path, value: str, says: str) -> None:
    result = tether_here("set", tmp_path, "max-staleness", value)
    assert result.returncode == 2
    assert says in result.stderr
