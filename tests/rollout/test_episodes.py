"""Episodes: their limits, their failures, and what a failed one costs its group."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import EngineError, EpisodeError, SettingsError
from protocol.messages import Call, Recalled, Rollout
from protocol.rollout_view import decode_rollout
from rollout.abandoned_tasks import AbandonedTasks
from rollout.config import EnvironmentConfig
from rollout.engines.base import EngineConfig, Sampling
from rollout.environments.base import Environment
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.episodes import EpisodeReport
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import EpisodeOver, Generate, Sample, SampleBuilder
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.record import Recording
from tests.rollout.test_abandoned_tasks import Stubborn
from tests.rollout.test_generate import Watched
from tests.rollout.tokenizers import write_tokenizer
from tests.services.bus.harness import eventually

PROMPT = Prompt("3+4=", metadata={"answer": "7"}, index=12)
NEVER = EngineConfig(name="scripted", seconds_per_token=3600.0)
Play = Callable[[Episode], Awaitable[float | None]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[Watched]:
    engine = Watched(model_dir)
    yield engine
    assert not engine._running
    await engine.close()


class Group:
    """Generates a group of four and keeps the reports of its episodes."""

    def __init__(self, engine: Watched, model_dir: Path) -> None:
        self.engine, self.renderer = engine, Renderer(model_dir, RenderConfig())
        self.reports: list[EpisodeReport] = []
        self.recording: Recording | None = None
        self.abandoned_tasks = AbandonedTasks(grace_s=0.01)

    async def generate(
        self,
        environment: Play | Environment,
        *,
        min_samples: int = 2,
        keep: int = 0,
        max_model_len: int = 0,
        **limits: float,
    ) -> Rollout:
        played = environment if isinstance(environment, Environment) else EpisodeEnvironment(environment)
        return await generate_group(
            self.engine, self.renderer, played, PROMPT,
            group=12, token="t0", n=4, sampling=Sampling(max_tokens=6), engine_name="engine.1",
            config=EnvironmentConfig(**limits), max_model_len=max_model_len, min_samples=min_samples,
            keep=keep, report=self.reports.append, recording=self.recording,
            abandoned_tasks=self.abandoned_tasks,
        )  # fmt: skip

    def failures(self) -> list[tuple[int, int, str]]:
        return sorted((r.sample, r.attempt, r.failure) for r in self.reports if r.failure)


@pytest.fixture
def group(engine: Watched, model_dir: Path) -> Group:
    return Group(engine, model_dir)


def failing(times: int, error: BaseException) -> Play:
    """An environment whose first `times` episodes raise after their first turn; each changes its metadata."""
    begun: list[Episode] = []

    async def play(episode: Episode) -> float:
        begun.append(episode)
        number = len(begun)
        assert episode.metadata.pop("answer") == "7"
        await episode.generate()
        if number <= times:
            raise error
        return float(number)

    return play


async def test_a_failed_sample_is_tried_again(group: Group) -> None:
    rollout = await group.generate(failing(1, KeyError("board")))
    assert len(decode_rollout(rollout).rows) == 4
    assert group.failures() == [(0, 0, "error")]
    assert [r.error for r in group.reports if r.failure] == [
        next(
            r.error
            for r in group.reports
            if "test_episodes.py:" in r.error and "KeyError: 'board'" in r.error
        )
    ]
    assert [(r.turns, r.tokens) for r in group.reports] == [(1, 6)] * 5


async def test_requests_of_another_attempt_have_ids_of_their_own(group: Group) -> None:
    await group.generate(failing(2, ValueError()))
    ids = [request.id for request in group.engine.requests]
    assert len(set(ids)) == 6
    assert all(id.rpartition("/")[0] == "12" for id in ids)


async def test_a_group_is_sent_without_the_samples_that_failed(group: Group) -> None:
    rollout = await group.generate(failing(2, RuntimeError("broken")), attempts=1)
    samples = decode_rollout(rollout).rows
    assert [sample.environment_reward for sample in samples] == [3.0, 4.0]
    assert group.failures() == [(0, 0, "error"), (1, 0, "error")]


async def test_a_group_of_too_few_samples_fails_with_the_reason(group: Group) -> None:
    with pytest.raises(EpisodeError, match=r"error: 3 of 4 episodes failed, such as: .*RuntimeError: broken"):
        await group.generate(failing(3, RuntimeError("broken")), attempts=1)
    with pytest.raises(EpisodeError, match="1 of 4 episodes failed"):
        await group.generate(failing(1, RuntimeError("broken")), attempts=1, min_samples=4)


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), TimeoutError(), EpisodeOver()])
async def test_whatever_an_environment_raises_costs_one_sample(group: Group, error: BaseException) -> None:
    class Raising(Environment):
        def __init__(self) -> None:
            self.begun = 0

        async def run(
            self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
        ) -> Sample:
            self.begun += 1
            if self.begun == 1:
                raise error
            completion = await generate(prompt_tokens, None)
            return Sample(completion.tokens, completion.logprobs, (1,) * 6, completion.spans, "stop")

    rollout = await group.generate(Raising(), attempts=1)
    assert len(rollout.responses) == 3
    assert [failure for _, _, failure in group.failures()] == [
        "length" if isinstance(error, EpisodeOver) else "error"
    ]


@pytest.mark.parametrize(
    ("limits", "reason", "attempts"),
    [({"call_s": 0.01}, "call_s", 8), ({"episode_s": 0.01}, "episode_s", 4)],
)
async def test_a_time_limit_fails_the_sample_and_aborts_its_request(
    model_dir: Path, limits: dict[str, float], reason: str, attempts: int
) -> None:
    engine = Watched(model_dir, NEVER)
    group = Group(engine, model_dir)
    with pytest.raises(EpisodeError, match=rf"{reason}: 4 of 4 episodes failed.*environment\.{reason} 0\.01"):
        await group.generate(failing(0, KeyError()), **limits)
    assert {failure for _, _, failure in group.failures()} == {reason}
    assert len(group.reports) == attempts
    assert not engine._running
    await engine.close()


async def test_an_error_of_a_call_counts_although_the_environment_catches_it(model_dir: Path) -> None:
    engine = Watched(model_dir, NEVER)
    group = Group(engine, model_dir)

    async def careless(episode: Episode) -> float:
        with contextlib.suppress(Exception):
            await episode.generate()
        return 0.0

    with pytest.raises(EpisodeError, match="call_s: 4 of 4"):
        await group.generate(careless, call_s=0.01)
    assert not engine._running
    await engine.close()


async def test_an_environment_that_ignores_its_time_limit_has_failed(group: Group) -> None:
    async def stubborn(episode: Episode) -> float:
        await episode.generate()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 1.0

    with pytest.raises(EpisodeError, match=r"episode_s: 4 of 4 .*episode_s 0\.05 s$"):
        await group.generate(stubborn, episode_s=0.05)


async def test_an_environment_that_ignores_its_end_is_left_without_a_call_of_the_model(
    group: Group, model_dir: Path
) -> None:
    engine, stubborn, asking = Watched(model_dir, NEVER), Stubborn(), []
    group.engine = engine

    async def clinging(episode: Episode) -> float:
        loop = asyncio.get_running_loop()
        asking.append(loop.create_task(episode.generate()))
        await stubborn.run()
        await episode.generate()
        return 1.0

    with pytest.raises(EpisodeError, match=r"4 of 4 .*, and it ignored its cancellation"):
        await group.generate(clinging, episode_s=0.05)
    assert group.abandoned_tasks.counts() == {"left": 4, "ended": 0}
    await eventually(lambda: all(task.done() for task in asking))
    assert not engine._running
    assert all("episode has ended" in str(task.exception()) for task in asking)
    stubborn.released.set()
    await eventually(lambda: group.abandoned_tasks.counts()["ended"] == 4)
    assert len(engine.requests) == 4
    await engine.close()


@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_model_len": 25}])
async def test_an_episode_without_turns_or_room_is_truncated(group: Group, limits: dict[str, int]) -> None:
    async def endless(episode: Episode) -> float:
        episode.reward = 0.25
        while True:
            await episode.generate()
            episode.insert("+")

    rollout = await group.generate(endless, **limits)
    samples = decode_rollout(rollout).rows
    assert rollout.finish_reasons == ("length",) * 4
    assert {sample.environment_reward for sample in samples} == {0.25}
    assert all(sample.sampled[-1] for sample in samples)
    lengths = rollout.lengths.numpy().tolist()
    assert lengths == [20] * 4 if "max_turns" in limits else [21] * 4
    assert not group.failures()


async def test_the_model_cannot_be_called_after_the_episode(group: Group) -> None:
    kept: list[Episode] = []

    async def play(episode: Episode) -> float:
        kept.append(episode)
        await episode.generate()
        return 0.0

    await group.generate(play)
    with pytest.raises(RuntimeError, match="the episode has ended"):
        await kept[0].generate()


class Recalling(Environment):
    """Its first attempt is answered from a record of older versions, of which nothing may be trained."""

    has_calls = True

    def __init__(self) -> None:
        self.begun: set[int] = set()

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        assert isinstance(generate, ModelCalls)
        assert generate.record is not None
        await generate.record.begin(replayable=True)
        generate.record.replayed = int(generate.record.index not in self.begun)
        self.begun.add(generate.record.index)
        builder = SampleBuilder()
        builder.sampled(await generate(prompt_tokens, None))
        sample = builder.finish("stop", 1.0)
        return replace(sample, loss_mask=(0,) * len(sample.tokens)) if generate.record.replayed else sample


class EmptyJournal:
    """Recalls nothing."""

    async def recall(self, sample: int) -> Recalled:
        return Recalled()

    async def store(self, call: Call) -> None:
        raise AssertionError(call)


async def test_a_record_of_which_nothing_may_be_trained_costs_no_attempt(group: Group) -> None:
    group.recording = Recording(EmptyJournal(), 12, "t0", "e", "engine.1", 1)
    rollout = await group.generate(Recalling(), attempts=1)
    assert len(decode_rollout(rollout).rows) == 4
    assert group.failures() == [(i, 0, "replay") for i in range(4)]


async def test_permanent_error_fails_the_group_at_once(group: Group) -> None:
    async def misfit(episode: Episode) -> float:
        raise SettingsError("prompt 12 lacks a board")

    with pytest.raises(SettingsError, match="lacks a board"):
        await group.generate(misfit)
    await group.engine.close()
    with pytest.raises(EngineError, match="closed"):
        await group.generate(failing(0, KeyError()))
    assert not group.reports


async def test_cancelling_a_group_ends_its_environments(group: Group) -> None:
    begun, ended = asyncio.Event(), []

    async def waiting(episode: Episode) -> float:
        try:
            await episode.generate()
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.append(episode)
        return 0.0

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(group.generate(waiting))
        await begun.wait()
        task.cancel()
    assert task.cancelled()
    assert len(ended) == 4
    assert not group.reports


def racing(lengths: dict[int, int], turns: list[Episode]) -> Play:
    """An environment whose i-th episode makes `lengths[i]` turns; one without a number waits for ever."""

    async def play(episode: Episode) -> float:
        number = len(turns)
        turns.append(episode)
        for _ in range(lengths.get(number, 0)):
            await episode.generate()
        if number not in lengths:
            await asyncio.Event().wait()
        return float(number)

    return play


async def test_the_first_samples_to_finish_are_kept_and_the_tokens_of_the_others_counted(
    group: Group,
) -> None:
    rollout = await group.generate(racing({0: 40, 1: 1, 2: 2, 3: 1}, []), keep=2)
    assert [sample.environment_reward for sample in decode_rollout(rollout).rows] == [1.0, 3.0]
    assert group.failures() == [(0, 0, "cancelled"), (2, 0, "cancelled")]
    assert rollout.cancelled is not None
    reported = [report.tokens for report in group.reports if report.failure]
    assert sorted(rollout.cancelled.numpy().tolist()) == sorted(reported)
    sampled = sum(report.tokens for report in group.reports)
    assert sampled == len(rollout.tokens.numpy()) + sum(reported)
    assert min(reported) >= 6


async def test_samples_that_finish_at_once_are_no_more_than_are_kept(group: Group) -> None:
    rollout = await group.generate(racing(dict.fromkeys(range(4), 1), []), keep=3)
    assert len(rollout.responses) == 3
    assert rollout.cancelled is not None
    assert rollout.cancelled.numpy().tolist() == [6]


async def test_a_request_that_is_cancelled_gives_the_tokens_that_it_had(model_dir: Path) -> None:
    engine = Watched(model_dir, EngineConfig(name="scripted", seconds_per_token=0.05))
    group, done = Group(engine, model_dir), asyncio.Event()

    async def play(episode: Episode) -> float:
        number = len(begun)
        begun.append(number)
        if number < 2:
            await done.wait()
            return await one_token(episode)
        asyncio.get_running_loop().call_later(0.12, done.set)
        await episode.generate()
        return 0.0

    async def one_token(episode: Episode) -> float:
        await episode.generate(max_tokens=1)
        return 1.0

    begun: list[int] = []
    rollout = await group.generate(play, keep=2)
    assert rollout.cancelled is not None
    assert all(1 <= tokens < 6 for tokens in rollout.cancelled.numpy().tolist())
    assert not engine._running
    await engine.close()


async def test_an_environment_that_is_not_needed_any_more_is_cancelled_wherever_it_is(group: Group) -> None:
    rollout = await group.generate(racing({0: 1, 1: 1, 2: 1}, []), keep=3, episode_s=60.0)
    assert len(rollout.responses) == 3
    assert group.failures() == [(3, 0, "cancelled")]


async def test_a_sample_that_failed_is_not_tried_again_once_enough_are_kept(group: Group) -> None:
    rollout = await group.generate(failing(2, ValueError()), keep=2, attempts=3)
    assert len(rollout.responses) == 2
    assert {failure for *_, failure in group.failures()} == {"error", "cancelled"}
