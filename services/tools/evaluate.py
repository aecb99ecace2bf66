"""Runs `tether eval`: scores a run's initial model and its checkpoints on held-out prompts.

All models are scored on one engine and the same prompts, beside the best constant answer. Weights reach the
engine as in training: published, staged, committed.
"""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from protocol.errors import SettingsError
from protocol.messages import ScoredRollout
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from rollout.engines.base import Engine, Sampling
from rollout.engines.registry import make_engine
from rollout.environments.registry import make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from services.runtime.user_modules import add_user_modules
from services.settings.hub import fetch_model
from services.settings.sections import Settings
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.registry import make_sender

CONSTANTS = 50
"""Most frequent held-out answers that are tried as a constant answer."""
MAX_RUNNING_SAMPLES = 64
"""Samples that are generated at once."""


async def evaluate_run(settings: Settings, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Score the initial model and `checkpoints` (by default the newest exported one) on the held-out prompts.

    Returns:
        {"prompts": n, "best_constant": score, "models": [{"model", "greedy", "sampled", ...}]}. Scores are
        mean rewards. Each model after the first also has its mean gain over the first, paired by prompt, and
        the standard error of that.

    Raises:
        SettingsError: there are no held-out prompts or no checkpoint.
        EngineError: the engine failed.
    """
    source = await asyncio.to_thread(make_source, settings.prompts)
    prompts = list(source.held_out())[: settings.eval.prompts]
    if not prompts:
        raise SettingsError("no held-out prompts to score on: set prompts.held_out or prompts.held_out_path")
    initial = await asyncio.to_thread(fetch_model, settings)
    models = [initial, *(checkpoints or [newest_export(settings.run_dir)])]
    renderer = await asyncio.to_thread(Renderer, settings.model_dir, settings.rendering)
    engine = make_engine(settings.engine, settings.model_dir, "eval")
    scored: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tether-eval-") as directory:
        sender = make_sender(
            WeightConfig(transport="disk", directory=directory),
            run=settings.run.name,
            run_dir=Path(directory),
        )
        async with ScorePool(settings.reward, add_user_modules(settings)) as pool:
            best = await best_constant(pool, prompts)
            scorer = _ModelScorer(settings, engine, renderer, pool, prompts)
            try:
                await engine.start()
                for version, model in enumerate(models):
                    tensors = in_dtype(load_model(model).items(), settings.engine.dtype)
                    manifest = await asyncio.to_thread(sender.publish, "eval", version, tensors)
                    await engine.stage(manifest)
                    await engine.commit(manifest)
                    scored.append({"model": str(model), **await scorer.score()})
            finally:
                await engine.close()
                sender.close()
    add_gains(scored)
    return {"prompts": len(prompts), "best_constant": best, "models": scored}


def add_gains(scored: list[dict[str, Any]]) -> None:
    """Replace the rewards of each prompt, `KIND_each`, by the gain over the first model.

    The gain is a mean over prompts, `KIND_gain`, with its standard error, `KIND_gain_stderr`.
    """
    for kind in ("greedy", "sampled"):
        rewards = [entry.pop(f"{kind}_each", None) for entry in scored]
        for entry, after in zip(scored[1:], rewards[1:], strict=True):
            if after is not None:
                gain, stderr = paired_difference(after, rewards[0])
                entry |= {f"{kind}_gain": gain, f"{kind}_gain_stderr": stderr}


def newest_export(run_dir: Path) -> Path:
    """Return the Hugging Face directory of the newest exported checkpoint. Raises SettingsError."""
    found = sorted((run_dir / "exports").glob("step_*[0-9]"))
    if not found:
        raise SettingsError(
            f"no exported checkpoint in {run_dir / 'exports'}: let the run finish, or give --checkpoint"
        )
    return found[-1]


def load_model(directory: Path) -> dict[str, Any]:
    """Return all tensors of a Hugging Face directory, by name. Raises SettingsError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SettingsError(f"no safetensors in {directory}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """Return the mean of after - before over the same prompts, and its standard error."""
    differences = [a - b for a, b in zip(after, before, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    return mean, math.sqrt(variance / n)


async def best_constant(pool: ScorePool, prompts: Sequence[Prompt]) -> float:
    """Return the highest mean reward that one answer gets if it is given to every prompt.

    The `CONSTANTS` most frequent right answers are tried. 0 if the prompts have no answers.
    """
    answers = Counter(str(prompt.metadata["answer"]) for prompt in prompts if "answer" in prompt.metadata)
    constants = [answer for answer, _ in answers.most_common(CONSTANTS)]
    if not constants:
        return 0.0
    totals = [0.0] * len(constants)
    for prompt in prompts:
        combined, _ = await pool.score(prompt.text, constants, prompt.metadata)
        totals = [total + value for total, value in zip(totals, combined, strict=True)]
    return max(totals) / len(prompts)


@dataclass(frozen=True, slots=True)
class _ModelScorer:
    """Scores the weights that an engine serves on a list of prompts."""

    settings: Settings
    engine: Engine
    renderer: Renderer
    pool: ScorePool
    prompts: Sequence[Prompt]

    async def score(self) -> dict[str, Any]:
        """Return the mean rewards, greedy and sampled, and under `KIND_each` those of each prompt."""
        result: dict[str, Any] = {}
        for kind, temperature, samples in (
            ("greedy", 0.0, 1),
            ("sampled", self.settings.eval.temperature, self.settings.eval.samples),
        ):
            if samples:
                each = await self._rewards(temperature, samples)
                result |= {kind: sum(each) / len(each), f"{kind}_each": each}
        return result

    async def _rewards(self, temperature: float, samples: int) -> list[float]:
        """Return the mean reward of each prompt over its samples."""
        config = self.settings.eval
        sampling = Sampling(
            max_tokens=self.settings.sampling.max_tokens,
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
        )
        slots = asyncio.Semaphore(max(1, MAX_RUNNING_SAMPLES // samples))
        environment = make_environment(self.settings.environment)

        async def one(index: int, prompt: Prompt) -> float:
            async with slots:
                rollout = await generate_group(
                    self.engine,
                    self.renderer,
                    environment,
                    prompt,
                    group=index,
                    token="eval",
                    n=samples,
                    engine_name="eval",
                    sampling=sampling,
                )
                result = await score_rollout(rollout, self.pool, "eval")
            if not isinstance(result, ScoredRollout):
                raise SettingsError(
                    f"held-out prompt {index} could not be scored: {result.verifier}: {result.error}"
                )
            return float(result.rewards.numpy().mean())

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(one(index, prompt), name=f"eval-{index}")
                for index, prompt in enumerate(self.prompts)
            ]
        return [task.result() for task in running]


def render_scores(scores: dict[str, Any]) -> str:
    """Return the scores as text, a line for each model."""
    lines = [f"held-out prompts: {scores['prompts']}, best constant answer: {scores['best_constant']:.3f}"]
    for entry in scores["models"]:
        parts = [f"{kind} {entry[kind]:.3f}" for kind in ("greedy", "sampled") if kind in entry]
        parts += [
            f"{kind} gain {entry[f'{kind}_gain']:+.3f} (standard error {entry[f'{kind}_gain_stderr']:.3f})"
            for kind in ("greedy", "sampled")
            if f"{kind}_gain" in entry
        ]
        lines.append(f"{entry['model']}: " + ", ".join(parts))
    return "\n".join(lines)
