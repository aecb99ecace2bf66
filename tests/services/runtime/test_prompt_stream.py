"""Tests that a process is held to the prompts with which its run was created."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from protocol.errors import SettingsError
from protocol.topics import Role
from rollout.prompts.base import PromptConfig
from rollout.prompts.named_source import MixtureConfig
from rollout.prompts.registry import make_source
from services.runtime import prompt_stream
from services.runtime.process import Process
from services.runtime.prompt_stream import check_fingerprint, check_stream
from services.settings.sections import RunConfig, Settings
from tests.contracts.ledger_rig import spec
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import eventually

ROWS = [json.dumps({"prompt": f"q{n}", "answer": str(n)}) + "\n" for n in range(50)]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """A worker that reads ROWS, before its run is in the ledger."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(ROWS))
    settings = Settings(run=RunConfig(dir=str(tmp_path / "run")), prompts=PromptConfig(path=str(path)))
    return Process(Role.ROLLOUT, settings, cast(Any, MemoryLedger()), "rollout")


async def created(process: Process) -> str:
    """Create the run with the prompts as they are now; returns their fingerprint."""
    fingerprint = make_source(process.settings.prompts).fingerprint
    await process.ledger.create(spec("run", fingerprint=fingerprint))
    return fingerprint


async def test_the_prompts_of_the_run_are_accepted_wherever_they_are(process: Process) -> None:
    await created(process)
    copy = process.settings.run_dir.with_name("copy.jsonl")
    copy.write_text("".join(ROWS))
    assert await check_stream(process, make_source(replace(process.settings.prompts, path=str(copy))))


@pytest.mark.parametrize("rows", [[*ROWS, ROWS[0]], ROWS[:20], [ROWS[1], ROWS[0], *ROWS[2:]]])
async def test_other_prompts_are_refused_with_both_fingerprints(process: Process, rows: list[str]) -> None:
    recorded = await created(process)
    path = Path(process.settings.prompts.path)
    path.write_text("".join(rows))
    source = make_source(process.settings.prompts)
    with pytest.raises(SettingsError) as caught:
        await check_stream(process, source)
    assert str(caught.value) == (
        f"setting prompts.path: the prompts in {path} have the fingerprint {source.fingerprint}, those of "
        f"the run {recorded}: give this host the prompts that the run was started with, or start a new run "
        f"in another directory than {process.settings.run_dir}"
    )


async def test_a_process_waits_for_a_run_that_the_ledger_does_not_have(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_stream, "POLL_S", 0.001)
    source = make_source(process.settings.prompts)
    async with asyncio.TaskGroup() as tasks:
        checking = tasks.create_task(check_stream(process, source))
        await eventually(lambda: process.waits == ["the run in the ledger"])
        await created(process)
        assert await checking
    assert process.waits == []


async def test_a_process_that_is_stopped_waits_no_longer(process: Process) -> None:
    process.stop.set()
    assert not await check_stream(process, make_source(process.settings.prompts))


def test_the_setting_that_is_named_says_where_the_prompts_are() -> None:
    mixed = PromptConfig(mixture=(MixtureConfig(name="easy", weight=1), MixtureConfig(name="hard", weight=1)))
    with pytest.raises(SettingsError, match=r"setting prompts\.mixture: the prompts of easy, hard have"):
        check_fingerprint(mixed, "a", "b", "?")
    with pytest.raises(SettingsError, match=r"setting prompts\.source: the prompts that reasoning_gym gen"):
        check_fingerprint(PromptConfig(source="reasoning_gym"), "a", "b", "?")
