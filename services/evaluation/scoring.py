"""Scores the weights that an engine serves on held-out prompts: greedy, and by several samples per prompt."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import EngineError, EngineSettingsError, EpisodeError, SettingsError
from protocol.host.key_proof import fetch_with_keys
from protocol.messages import Rollout, ScoredRollout, WeightManifest
from protocol.rollout_view import sample_lengths
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from rollout.abandoned_tasks import AbandonedTasks
from rollout.engines.base import Engine, Sampling
from rollout.engines.registry import make_engine
from rollout.environments.base import Environment
from rollout.environments.registry import evaluated, make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from services.evaluation.estimates import PromptScore, greedy_fields, sampled_fields
from services.run_record.evaluations import Evaluation
from services.runtime.user_modules import add_user_modules
from services.settings.evaluation import eval_engine, pass_at_k_values
from services.settings.hub import fetch_model
from services.settings.sections import Settings

log = logging.getLogger(__name__)

MAX_RUNNING_SAMPLES = 64
"""Minimum number of samples that are generated concurrently."""


@dataclass(frozen=True, slots=True)
class SetScores:
    """Scores of one set, prompt by prompt."""

    greedy: Sequence[PromptScore]
    sampled: Sequence[PromptScore]
    """Scores of the sampled answers; empty if none were sampled."""
    seconds: float


class Scorer:
    """An engine with everything needed to score its served version."""

    def __init__(self, settings: Settings, engine: Engine, pool: ScorePool, renderer: Renderer) -> None:
        self._settings = settings
        self.pool = pool
        self._renderer = renderer
        self._environment: Environment = make_environment(evaluated(settings.environment))
        self._environment.apply_engine_config(settings.engine)
        self._abandoned_tasks = AbandonedTasks()
        self.engine = engine

    async def close(self) -> None:
        """Release the environment's resources."""
        await self._environment.close()

    async def serve(self, manifest: WeightManifest) -> None:
        """Load a version into the engine.

        Raises:
            WeightError: the version cannot be fetched; the engine serves its previous version.
            PoisonedError: the engine must not be used any more.
        """
        served = self.engine.served
        if (served.epoch, served.version, served.digest) != (
            manifest.epoch,
            manifest.version,
            manifest.digest,
        ):
            await self.engine.stage(manifest)
            await self.engine.commit(manifest)

    async def score(self, prompts: Sequence[Prompt]) -> SetScores:
        """Score the served version on the prompts of one set.

        A prompt that cannot be generated or scored gets an error, never a reward of 0.

        Raises:
            EngineError: the engine has ended, or has generated under another version.
            TetherError: too many episodes do not end after their cancellation.
        """
        config, began = self._settings.eval, time.monotonic()
        greedy = await self._answers(prompts, self._sampling(temperature=0.0), 1)
        sampling_options = self._sampling(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
        )
        sampled = await self._answers(prompts, sampling_options, config.samples) if config.samples else []
        return SetScores(greedy, sampled, time.monotonic() - began)

    def _sampling(self, **options: Any) -> Sampling:
        return Sampling(
            max_tokens=self._settings.sampling.max_tokens,
            stop_token_ids=self._renderer.stop_token_ids,
            **options,
        )

    async def _answers(
        self, prompts: Sequence[Prompt], sampling: Sampling, samples: int
    ) -> list[PromptScore]:
        running = max(MAX_RUNNING_SAMPLES, eval_engine(self._settings).max_running)
        slots = asyncio.Semaphore(max(1, running // samples))

        async def one(index: int, prompt: Prompt) -> PromptScore:
            async with slots:
                return await self._score_prompt(index, prompt, sampling, samples)

        async with asyncio.TaskGroup() as tasks:
            scores = [
                tasks.create_task(one(index, prompt), name=f"eval-{index}")
                for index, prompt in enumerate(prompts)
            ]
        return [score.result() for score in scores]

    async def _score_prompt(
        self, index: int, prompt: Prompt, sampling: Sampling, samples: int
    ) -> PromptScore:
        self._abandoned_tasks.check()
        version, began = self.engine.served.version, time.monotonic()
        try:
            rollout = await generate_group(
                self.engine,
                self._renderer,
                self._environment,
                prompt,
                group=index,
                token=f"eval-{version}",
                n=samples,
                engine_name="eval",
                sampling=sampling,
                config=self._settings.environment,
                max_model_len=eval_engine(self._settings).max_model_len,
                abandoned_tasks=self._abandoned_tasks,
                with_turn_texts=self._settings.reward.may_score_turns,
            )
        except (SettingsError, EngineError, EpisodeError) as error:
            await self.engine.check()  # a dead engine ends the evaluation; a bad prompt only fails itself
            return PromptScore(error=f"prompt {index}: {error}")
        check_versions(rollout, version)
        seconds = time.monotonic() - began
        result = await score_rollout(rollout, self.pool, "eval")
        if not isinstance(result, ScoredRollout):
            return PromptScore(error=f"prompt {index}: {result.verifier}: {result.error}")
        return PromptScore(
            rewards=tuple(result.rewards.numpy().tolist()),
            lengths=tuple(sample_lengths(rollout)),
            truncated=tuple(reason == "length" for reason in rollout.finish_reasons),
            tokens=int(rollout.loss_mask.numpy().sum()) / samples,
            seconds=seconds,
        )


def check_versions(rollout: Rollout, version: int) -> None:
    """Check that every token of a group was sampled under one version.

    Raises:
        EngineError: tokens have other versions; the message names them.
    """
    found = {int(row[2]) for row in rollout.spans.numpy()}
    if found != {version}:
        raise EngineError(
            f"prompt {rollout.group}: sampled under version {', '.join(map(str, sorted(found)))} "
            f"while version {version} was evaluated"
        )


def evaluation_of(settings: Settings, manifest: WeightManifest, name: str, scores: SetScores) -> Evaluation:
    """Return the line of eval.jsonl for the scores of a version on the set `name`."""
    every = [*scores.greedy, *scores.sampled]
    failures = {i % len(scores.greedy) for i, score in enumerate(every) if score.error}
    samples = settings.eval.samples
    # all means are over the same prompts: a prompt that failed greedy or sampled is excluded from both
    greedy, sampled = (
        [score for i, score in enumerate(scored) if i not in failures]
        for scored in (scores.greedy, scores.sampled)
    )
    return Evaluation(
        version=manifest.version,
        step=manifest.version - 1 if manifest.version else None,
        epoch=manifest.epoch,
        digest=f"{manifest.digest:016x}",
        set=name,
        n=len(scores.greedy) - len(failures),
        failed=len(failures),
        error=next((score.error for score in every if score.error), "")[:300],
        samples=samples,
        **greedy_fields(greedy),
        **(sampled_fields(sampled, pass_at_k_values(samples), settings.eval.success) if samples else {}),
        engine=eval_engine(settings).name,
        seconds=round(scores.seconds, 3),
        time=time.time(),
    )


@contextlib.asynccontextmanager
async def open_scorer(settings: Settings, name: str, lora: LoraConfig = NO_ADAPTERS) -> AsyncIterator[Scorer]:
    """Start the engine and the reward workers of an evaluation; both end with the block.

    Args:
        settings: settings of the run.
        name: name of the engine in errors and logs.
        lora: adapter of the versions, if any.

    Raises:
        SettingsError: the settings do not allow engine, renderer, environment or verifiers.
        EngineError: the engine did not start in two attempts.
    """
    modules = add_user_modules(settings)
    fetch_with_keys(settings.bus.curve_dir)
    await asyncio.to_thread(fetch_model, settings)
    renderer = await asyncio.to_thread(Renderer, settings.model_dir, settings.rendering)
    engine = await _start_with_retry(settings, name, lora)
    try:
        async with ScorePool(settings.reward, modules) as pool:
            scorer = Scorer(settings, engine, pool, renderer)
            try:
                yield scorer
            finally:
                await scorer.close()
    finally:
        await engine.close()


async def _start_with_retry(settings: Settings, name: str, lora: LoraConfig) -> Engine:
    """Start an engine, with a second attempt after an engine error. Raises as `open_scorer`.

    vLLM refuses to start while another process frees memory on its GPU, such as a process of a run that has
    just ended.
    """
    try:
        return await _start(settings, name, lora)
    except EngineSettingsError:
        raise
    except EngineError as error:
        log.warning("evaluation.engine_failed error=%s; it is started once more", error)
    return await _start(settings, name, lora)


async def _start(settings: Settings, name: str, lora: LoraConfig) -> Engine:
    engine = make_engine(eval_engine(settings), settings.model_dir, name, lora)
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine
