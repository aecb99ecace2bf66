"""Generating groups on the scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import (
    EngineError,
    EpisodeError,
    FrameTooLarge,
    InvalidRequest,
    SettingsError,
    Unsupported,
)
from protocol.messages import Rollout, ScoredRollout
from protocol.rollout_view import decode_rollout
from protocol.turns import turns_of
from reward.config import RewardConfig, VerifierConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.base import Environment
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.environments.registry import make_environment
from rollout.generate import failure_reason, generate_group
from rollout.prompts.base import Prompt
from rollout.render import PromptTooLong, RenderConfig, Renderer
from rollout.sample import Generate, Sample
from tests.rollout.tokenizers import write_tokenizer
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.step.plan import plan_step

PROMPT = Prompt("3+4=", metadata={"answer": "7"}, index=12)
SAMPLING = Sampling(max_tokens=6, stop_token_ids=(1,))
CONFIG = EngineConfig(name="scripted")


class Watched(ScriptedEngine):
    """The scripted engine serving version 5; notes its requests."""

    def __init__(self, model_dir: Path, config: EngineConfig = CONFIG) -> None:
        super().__init__(config, model_dir, "engine.1")
        self._served = replace(self._served, epoch="e", version=5)
        self.requests: list[Request] = []
        self.running = 0
        self.busy = asyncio.Event()
        """Set once every sample of a group of four is running."""

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.running += 1
        if self.running == 4:
            self.busy.set()
        try:
            return await super().generate(request)
        finally:
            self.running -= 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir, RenderConfig(max_prompt_tokens=8))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[Watched]:
    engine = Watched(model_dir)
    await engine.start()
    yield engine
    await engine.close()


async def generate(
    engine: Watched, renderer: Renderer, environment: Environment | None = None, prompt: Prompt = PROMPT
) -> Rollout:
    return await generate_group(
        engine, renderer, environment or make_environment(EnvironmentConfig()), prompt,
        group=12, token="t0", n=4, sampling=SAMPLING, engine_name="engine.1",
    )  # fmt: skip


async def test_a_group_holds_n_samples_with_their_text(engine: Watched, renderer: Renderer) -> None:
    rollout = await generate(engine, renderer)
    views = decode_rollout(rollout).rows
    assert len(views) == 4
    assert (rollout.group, rollout.token, rollout.engine, rollout.prompt_text) == (
        12,
        "t0",
        "engine.1",
        "3+4=",
    )
    assert tuple(rollout.prompt_tokens.numpy()) == renderer.prompt_tokens(PROMPT)
    for view in views:
        assert view.response == renderer.text(tuple(view.tokens))
        assert view.sampled.all()
        assert set(view.versions) == {5}
        assert view.finish_reason in {"stop", "length"}
    assert rollout.generate_s >= 0
    assert rollout.read_tokens == 4 * len(rollout.prompt_tokens.numpy())
    assert (rollout.cached_tokens, rollout.row_texts) == (0, ())


async def test_request_ids_are_distinct_and_start_with_the_group(engine: Watched, renderer: Renderer) -> None:
    await generate(engine, renderer)
    ids = [request.id for request in engine.requests]
    assert len(set(ids)) == 4
    assert all(id.rpartition("/")[0] == "12" for id in ids)


async def test_turns_of_a_game_become_one_sample(engine: Watched, renderer: Renderer) -> None:
    game = make_environment(EnvironmentConfig("guess_number", {"max_turns": 3, "turn_tokens": 2}))
    prompt = replace(PROMPT, metadata={"answer": 10**9})
    rollout = await generate(engine, renderer, game, prompt)
    views = decode_rollout(rollout).rows
    assert rollout.finish_reasons == ("environment",) * 4
    assert [view.environment_reward for view in views] == [0.0] * 4
    assert all(0 < view.sampled.sum() <= 6 and not view.sampled.all() and view.sampled[-1] for view in views)
    assert len({request.id for request in engine.requests}) == 12
    assert all(request.sampling.max_tokens == 2 for request in engine.requests)


async def test_an_environment_cannot_ask_for_more_than_the_settings_allow(
    engine: Watched, renderer: Renderer
) -> None:
    await generate(
        engine,
        renderer,
        make_environment(EnvironmentConfig("guess_number", {"max_turns": 1, "turn_tokens": 99})),
    )
    assert all(request.sampling == SAMPLING for request in engine.requests)


async def test_cancelling_leaves_no_request(model_dir: Path, renderer: Renderer) -> None:
    engine = Watched(model_dir, replace(CONFIG, seconds_per_token=3600.0))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generate(engine, renderer))
        await engine.busy.wait()
        task.cancel()
    assert task.cancelled()
    assert engine.running == 0
    assert not engine._running
    await engine.close()


async def test_an_engine_error_is_raised_unwrapped_and_cancels_the_other_samples(
    model_dir: Path, renderer: Renderer
) -> None:
    engine = Watched(model_dir, replace(CONFIG, seconds_per_token=3600.0))

    class OneFails(Environment):
        async def run(
            self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
        ) -> Sample:
            if len(engine.requests) == 3:
                await generate((10**6,), None)
            await generate(prompt_tokens, None)
            raise AssertionError

    with pytest.raises(EngineError, match="token id 1000000 is out of range"):
        await generate(engine, renderer, OneFails())
    assert engine.running == 0
    await engine.close()


async def test_a_request_that_the_engine_ends_is_an_error_not_a_short_sample(
    model_dir: Path, renderer: Renderer
) -> None:
    engine = Watched(model_dir, replace(CONFIG, seconds_per_token=3600.0))

    async def abort() -> None:
        await engine.busy.wait()
        await engine.abort([engine.requests[2].id])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(abort())
        with pytest.raises(EngineError, match=r"12/2.*the engine aborted it after 0 tokens"):
            await generate(engine, renderer)
    assert engine.running == 0
    await engine.close()


async def test_a_prompt_that_cannot_be_rendered_reaches_no_engine(
    engine: Watched, renderer: Renderer
) -> None:
    with pytest.raises(PromptTooLong, match="prompt 3 has 9 tokens"):
        await generate(engine, renderer, prompt=Prompt("123456789", index=3))
    with pytest.raises(SettingsError, match="needs a whole number"):
        await generate(engine, renderer, make_environment(EnvironmentConfig("guess_number")), Prompt("x"))
    assert not engine.requests


SCORE = """
def score(*, turns, contexts, metadata):
    assert contexts == ["", "12", "3"]
    return [float(text.count(metadata["answer"])) - place for place, text in enumerate(turns)]
"""


async def play(episode: Episode) -> float | None:
    for said in ("1", "2", "3"):
        await episode.generate(4)
        if said != "3":
            episode.insert("12" if said == "1" else "3")
    return None


async def generated(directory: Path, *, texts: bool) -> Rollout:
    write_tokenizer(directory / "model")
    engine = Watched(directory / "model")
    await engine.start()
    try:
        return await generate_group(
            engine, Renderer(directory / "model", RenderConfig()), EpisodeEnvironment(play),
            Prompt("3+4=", metadata={"answer": "7"}), group=1, token="t", n=3,
            sampling=Sampling(max_tokens=4, stop_token_ids=(1,)), engine_name="e", with_turn_texts=texts,
        )  # fmt: skip
    finally:
        await engine.close()


@pytest.mark.xdist_group("sandbox")
async def test_scores_of_an_environments_turns_become_advantages_of_their_tokens(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, texts=True)
    turns = turns_of(rollout)
    assert turns is not None
    assert [len(of_sample) for of_sample in turns] == [3, 3, 3]
    (tmp_path / "own_steps.py").write_text(SCORE)
    config = RewardConfig(verifiers=(VerifierConfig("function", options={"path": "own_steps:score"}),))
    async with ScorePool(config, [str(tmp_path)]) as pool:
        scored = await score_rollout(rollout, pool, "reward.1")
    assert isinstance(scored, ScoredRollout), scored
    assert scored.turn_rewards is not None
    assert scored.turn_rewards.numpy().sum() == pytest.approx(scored.rewards.numpy().sum())
    wanted = [text.count("7") - place for text, place in zip(rollout.turn_texts, [0, 1, 2] * 3, strict=True)]
    assert scored.turn_rewards.numpy().tolist() == wanted
    made = plan_step([(scored, 1)], step=5, algorithm=make_algorithm(AlgorithmConfig(name="dr_grpo")))
    assert made.turns is not None
    returns = [[sum(wanted[i + k : i + 3]) for k in range(3)] for i in (0, 3, 6)]
    assert [values.tolist() for values in made.turns.returns] == returns


async def test_texts_of_turns_are_sent_where_no_row_has_its_text_or_a_verifier_may_ask(
    tmp_path: Path,
) -> None:
    rollout = await generated(tmp_path, texts=False)
    assert len(rollout.turn_texts) == 9
    assert rollout.turn_contexts == ("", "12", "3") * 3
    assert rollout.row_texts == ()
    assert RewardConfig(verifiers=(VerifierConfig("function"),)).may_score_turns
    assert not RewardConfig(verifiers=(VerifierConfig("math"),)).may_score_turns


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("engine rollout.0: no answer to marks: none within 60 s"), "engine"),
        (Unsupported("engine rollout.0 cannot sleep"), "engine"),
        (InvalidRequest("request 7/0: the prompt is empty"), "prompt"),
        (SettingsError("row 7: no field prompt"), "prompt"),
        (FrameTooLarge("2000 bytes"), "prompt"),
        (EpisodeError("call_s", "no answer"), "episode"),
    ],
)
def test_only_what_is_wrong_with_the_request_is_blamed_on_the_prompt(error: Exception, reason: str) -> None:
    assert failure_reason(error) == reason


async def test_a_stop_string_of_several_tokens_ends_a_sample_at_its_last_one(model_dir: Path) -> None:
    """The tokens are those that the engine sampled without the string, up to the first match."""
    engine = Watched(model_dir)
    await engine.start()

    async def samples(stop: tuple[str, ...]) -> Rollout:
        return await generate_group(
            engine, Renderer(model_dir, RenderConfig(stop=stop, stop_at_eos=False)),
            make_environment(EnvironmentConfig(name="single_turn")), PROMPT, group=1, token="t", n=4,
            sampling=Sampling(max_tokens=24), engine_name="e",
        )  # fmt: skip

    try:
        whole = decode_rollout(await samples(()))
        renderer = Renderer(model_dir, RenderConfig())
        stop = "".join(map(renderer.piece, whole.rows[0].tokens[9:13].tolist()))
        cut = decode_rollout(await samples((stop,)))
    finally:
        await engine.close()
    assert {sample.finish_reason for sample in whole.rows} == {"length"}
    assert [(len(sample.tokens), sample.finish_reason) for sample in cut.rows] == [(13, "stop")] * 4
    for short, long in zip(cut.rows, whole.rows, strict=True):
        assert short.tokens.tolist() == long.tokens.tolist()[: len(short.tokens)]
        assert short.logprobs.tolist() == long.logprobs.tolist()[: len(short.tokens)]
