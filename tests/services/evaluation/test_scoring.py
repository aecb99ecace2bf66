"""Tests scoring on a real engine: one version only, bad prompts in no mean, any number of samples."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from protocol.errors import EngineError, EngineSettingsError, innermost
from protocol.messages import WeightManifest
from rollout.prompts.base import Prompt
from services.evaluation import scoring as scoring_module
from services.evaluation.estimates import PromptScore
from services.evaluation.scoring import Scorer, SetScores, evaluation_of, open_scorer
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.changes import slow_unless_changed
from tests.integration.loop import ROOT
from trainer.config import WeightConfig
from trainer.random_model import build_scratch
from trainer.weights.files import disk_sender


def settings_of(run_dir: Path, *overrides: str) -> Settings:
    """The demo on the scripted engine, whose answers are hashes: it samples 12 of 64 tokens."""
    settings = load_settings(
        str(ROOT / "deploy/configs/demo.toml"),
        [f"run.dir={json.dumps(str(run_dir))}", "engine.name=scripted", "sampling.max_tokens=4", *overrides],
        environ={},
    )
    assert settings.model.scratch is not None
    build_scratch(settings.model.scratch, settings.model_dir)
    return settings


def version(directory: Path, number: int) -> WeightManifest:
    sender = disk_sender(WeightConfig(directory=str(directory), keep=9), directory)
    return sender.publish("e1", number, [("weight", torch.full((4,), float(number)))])


@asynccontextmanager
async def scoring(settings: Settings) -> AsyncIterator[Scorer]:
    async with open_scorer(settings, "eval") as scorer:
        await scorer.serve(version(settings.run_dir / "versions", 3))
        yield scorer


PROMPTS = [Prompt(text=f"{n}=", metadata={"answer": "1"}) for n in (123, 456, 789)]


async def test_scores_are_of_every_prompt_and_sample(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "eval.samples=3")
    async with scoring(settings) as scorer:
        scores = await scorer.score(PROMPTS)
        manifest = version(tmp_path / "versions", 3)
    assert [len(score.rewards) for score in scores.greedy] == [1, 1, 1]
    assert [len(score.rewards) for score in scores.sampled] == [3, 3, 3]
    row = evaluation_of(settings, manifest, "held_out", scores)
    assert (row.version, row.step, row.set, row.n, row.failed) == (3, 2, "held_out", 3, 0)
    assert row.digest == f"{manifest.digest:016x}"
    assert sorted(row.pass_at_k) == [1, 2]
    assert row.truncated == sum(score.truncated[0] for score in scores.greedy) / 3


ASKS_TWICE = """
import json, os, urllib.request
said = [{"role": "user", "content": "1"}]
for text in ("2", "3"):
    body = json.dumps({"model": "policy", "messages": said}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    ask = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(ask))["choices"][0]["message"]
    said += [answer, {"role": "user", "content": text}]
alone = not os.path.exists("mark")
open("mark", "w").write("")
open(os.environ["TETHER_OUTCOME"], "w").write(json.dumps({"reward": float(alone)}))
"""


@slow_unless_changed("rollout/sandboxes/", "rollout/environments/command.py", "services/evaluation/")
async def test_agents_are_scored_in_sandboxes_of_their_own_and_say_what_they_cost(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "eval.samples=2", "reward.verifiers=[]", "render.chat_template=off",
        "environment.name=command",
        f"environment.options.command={json.dumps(['python3', '-c', ASKS_TWICE])}",
        "environment.sandbox.name=bubblewrap", "environment.sandbox.memory_mb=256",
    )  # fmt: skip
    async with scoring(settings) as scorer:
        scores = await scorer.score(PROMPTS[:2])
        manifest = version(tmp_path / "versions", 3)
    row = evaluation_of(settings, manifest, "held_out", scores)
    assert (row.failed, row.error, row.greedy, row.pass_at_k) == (0, "", 1.0, {1: 1.0, 2: 1.0})
    for tokens, length, seconds in (
        (row.tokens, row.length, row.prompt_s),
        (row.sampled_tokens, row.sampled_length, row.sampled_prompt_s),
    ):
        assert tokens is not None
        assert length is not None
        assert 2 <= tokens < length
        assert seconds


async def test_prompt_that_cannot_be_generated_or_scored_is_in_no_mean(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "eval.samples=0", "engine.max_model_len=32", "render.max_prompt_tokens=16"
    )
    prompts = [
        PROMPTS[0],
        Prompt(text="1" * 40 + "=", metadata={"answer": "1"}),  # too long
        Prompt(text="7=", metadata={}),  # without an answer
    ]
    async with scoring(settings) as scorer:
        scores = await scorer.score(prompts)
        manifest = version(tmp_path / "versions", 3)
    assert [bool(score.error) for score in scores.greedy] == [False, True, True]
    row = evaluation_of(settings, manifest, "held_out", scores)
    assert (row.n, row.failed, row.samples, row.sampled) == (1, 2, 0, None)
    assert row.error.startswith("prompt 1: ")


def test_all_means_are_over_the_prompts_without_any_failure(tmp_path: Path) -> None:
    """The first fails greedily, the second sampled: both kinds of mean are of the third."""
    failed = PromptScore(error="late")
    greedy = [failed, *(PromptScore((reward,), (2,), (True,)) for reward in (1.0, 0.25))]
    sampled = [PromptScore((reward,) * 2, (4, 6), (False, False)) for reward in (1.0, 0.0, 0.5)]
    sampled[1] = failed
    manifest = version(tmp_path / "versions", 3)
    settings = settings_of(tmp_path, "eval.samples=2")
    row = evaluation_of(settings, manifest, "held_out", SetScores(greedy, sampled, 1.0))
    assert (row.n, row.failed, row.greedy, row.sampled) == (1, 2, 0.25, 0.5)
    assert (row.length, row.truncated, row.sampled_length, row.pass_at_k) == (2.0, 1.0, 5.0, {1: 0.0, 2: 0.0})


async def test_sample_of_another_version_is_an_error(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "eval.samples=0")

    async def score_across_a_commit() -> None:
        async with scoring(settings) as scorer, asyncio.TaskGroup() as tasks:
            await scorer.engine.pause()
            tasks.create_task(scorer.score(PROMPTS))
            later = version(tmp_path / "versions", 4)
            await scorer.engine.stage(later)  # in a thread, so the requests are waiting when it returns
            await scorer.engine.commit(later)
            await scorer.engine.resume()

    with pytest.raises(ExceptionGroup) as caught:
        await score_across_a_commit()
    assert isinstance(innermost(caught.value), EngineError)
    assert "sampled under version 4 while version 3 was evaluated" in str(innermost(caught.value))


class Repair(logging.Handler):
    """Makes a model one that no engine loads, and repairs it when an engine was found not to start."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        self._config = model_dir / "config.json"
        self._before = self._config.read_text()
        facts = json.loads(self._before)  # its files have tensors of another shape, which torch notices
        self._config.write_text(json.dumps({**facts, "intermediate_size": facts["intermediate_size"] * 2}))
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self._config.write_text(self._before)


async def test_engine_that_does_not_start_is_started_once_more_and_that_is_said(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "engine.name=hf", "engine.dtype=float32")
    repair = Repair(settings.model_dir)
    scoring_module.log.addHandler(repair)
    try:
        async with open_scorer(settings, "eval") as scorer:
            await scorer.engine.check()
    finally:
        scoring_module.log.removeHandler(repair)
    assert len(repair.said) == 1
    assert "evaluation.engine_failed error=engine hf cannot load" in repair.said[0]


async def test_request_refused_by_an_engine_is_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, "engine.name=hf", "engine.dtype=float32")
    config = settings.model_dir / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen2"', '"model_type": "none"'))
    with pytest.raises(EngineSettingsError, match="engine hf cannot load"):
        async with open_scorer(settings, "eval"):
            pass
    assert "evaluation.engine_failed" not in caplog.text
