"""Tests the traces of decode steps that engines write, and the settings that ask for them."""

import gzip
import json
from pathlib import Path

import pytest

from protocol.device.profiles import StepProfile
from protocol.errors import EngineError, SettingsError
from rollout.engines.base import Engine, EngineConfig, Request, Sampling
from rollout.engines.contract.models import tiny_model
from rollout.engines.registry import make_engine
from services.settings.load import load_settings
from tests.changes import slow_unless_changed
from tests.contracts.sglang_environment import sglang_settings

STEPS = 3
WATCHED_VLLM = ("rollout/engines/vllm/", "protocol/device/profiles")
"""Beginnings of paths on which vLLM's trace depends."""


def events(file: Path) -> list[str]:
    """Return the names of the events in a trace."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    return [str(event.get("name")) for event in trace["traceEvents"]]


async def generate(engine: Engine, name: str) -> None:
    await engine.generate(Request(name, (5, 17, 200, 33), Sampling(max_tokens=12, temperature=0)))


@pytest.mark.parametrize(
    "name",
    [
        "hf",
        pytest.param(
            "vllm",
            marks=[pytest.mark.engine, slow_unless_changed(*WATCHED_VLLM)],
        ),
        pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param("megatron", marks=pytest.mark.slow),
    ],
)
async def test_an_engine_leaves_a_trace_of_the_decode_steps_asked_for(tmp_path: Path, name: str) -> None:
    tiny_model(1).save_pretrained(tmp_path / "model")
    own = sglang_settings() if name == "sglang" else {}
    engine = make_engine(EngineConfig(name=name, max_model_len=64, **own), tmp_path / "model", "e")
    try:
        await engine.start()
        await engine.profile(tmp_path / "profiles" / "version_7.e", STEPS)
        await generate(engine, "watched/0")
        written = tmp_path / "profiles" / "version_7.e.rank_00000.json.gz"
        first = events(written)
        await engine.profile(tmp_path / "profiles" / "version_8.e", 1000)  # more than there will be
        await generate(engine, "shorter/0")
        await engine.profile(tmp_path / "none", 0)
        second = events(tmp_path / "profiles" / "version_8.e.rank_00000.json.gz")
        assert events(written) == first
        assert len(list(tmp_path.rglob("*.gz"))) == 2
        if name == "hf":
            (tmp_path / "file").touch()
            await engine.profile(tmp_path / "file" / "inside", 1)
            with pytest.raises(EngineError, match="cannot be written"):
                await engine.profile(tmp_path / "none", 0)
            await generate(engine, "after/0")
    finally:
        await engine.close()
    # each decode step multiplies by the same matrices, the prompt's by fewer at most; 12 tokens are 12 steps
    in_steps, in_twelve = (sum(event == "aten::mm" for event in found) for found in (first, second))
    decode, rest = divmod(in_twelve - in_steps, 12 - STEPS)
    assert rest == 0
    assert 0 < in_steps - (STEPS - 1) * decode <= decode


def test_a_trace_that_cannot_be_written_ends_no_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    profile = StepProfile()
    profile.begin_or_end(str(tmp_path / "file" / "inside"), 0, 1)
    profile.step_begins()
    profile.step_begins()
    assert "profile.not_written" in caplog.text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["engine.profile_versions=[3]"], "first and the last version"),
        (["engine.profile_versions=[3,2]"], "first and the last version"),
        (
            ["engine.profile_versions=[3,4]", "engine.name=scripted"],
            "'scripted'; remove the setting",
        ),
    ],
)
def test_versions_to_profile_are_the_first_and_the_last_of_an_engine_that_can(
    values: list[str], words: str
) -> None:
    with pytest.raises(SettingsError, match=rf"setting engine\.profile_versions: .*{words}"):
        load_settings(None, values, environ={})
