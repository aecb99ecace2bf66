"""`tether eval`: held-out scores of a run's initial model and its checkpoints, on one engine, beside the best
constant answer.

All models are scored on the same prompts. Weights reach the engine as in training: published, staged,
committed.
"""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
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
from services.settings.sections import Settings
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.registry import make_sender

CONSTANTS = 50
"""Most frequent held-out answers that are tried as a constant answer."""
AT_ONCE = 64


async def evaluate_run(settings: Settings, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Score the initial model and `checkpoints` (by default the newest exported one) on the held-out prompts.

    Returns:
        {"prompts": n, "best_constant": score, "models": [{"model", "greedy", "sampled", ...}]}; scores are
        mean rewards. Each model after the first also has the paired difference to the first and its standard
        error.

    Raises:
        SettingsError: if there are no held-out prompts or no checkpoint.
    """
    source = await asyncio.to_thread(make_source, settings.prompts)
    prompts = list(source.held_out())[: settings.eval.prompts]
    if not prompts:
        raise SettingsError(
            "no held-out prompts: set prompts.held_out (or a held-out file) so that there is something to score on"
        )
    models = [settings.model_dir, *(checkpoints or [newest_export(settings.run_dir)])]
    renderer = await asyncio.to_thread(Renderer, settings.model_dir, settings.render)
    engine = make_engine(settings.engine, settings.model_dir, "eval")
    scored: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tether-eval-") as directory:
        sender = make_sender(
            WeightConfig(transport="disk", directory=directory),
            run=settings.run.name,
            run_dir=Path(directory),
        )
        async with ScorePool(settings.reward) as pool:
            best = await best_constant(pool, renderer, prompts)
            try:
                await engine.start()
                for version, model in enumerate(models):
                    tensors = in_dtype(load_model(model).items(), settings.engine.dtype)
                    manifest = await asyncio.to_thread(sender.publish, "eval", version, tensors)
                    await engine.stage(manifest)
                    await engine.commit(manifest)
                    scored.append(
                        {"model": str(model), **await _score_model(settings, engine, renderer, pool, prompts)}
                    )
            finally:
                await engine.close()
                sender.close()
    for entry in scored[1:]:
        for kind in ("greedy", "sampled"):
            if f"{kind}_each" in entry:
                entry[f"{kind}_gain"], entry[f"{kind}_gain_stderr"] = paired_difference(
                    entry[f"{kind}_each"], scored[0][f"{kind}_each"]
                )
    for entry in scored:
        entry.pop("greedy_each"), entry.pop("sampled_each", None)
    return {"prompts": len(prompts), "best_constant": best, "models": scored}


def newest_export(run_dir: Path) -> Path:
    """The Hugging Face directory of the newest checkpoint that has one."""
    found = sorted((run_dir / "exports").glob("step_*[0-9]"))
    if not found:
        raise SettingsError(
            f"no exported checkpoint in {run_dir / 'exports'}: let the run finish, or give --checkpoint"
        )
    return found[-1]


def load_model(directory: Path) -> dict[str, Any]:
    """All tensors of a Hugging Face directory, by name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SettingsError(f"no safetensors in {directory}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """Mean of after - before over the same prompts, and its standard error."""
    differences = [a - b for a, b in zip(after, before, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    return mean, math.sqrt(variance / n)


async def best_constant(pool: ScorePool, renderer: Renderer, prompts: Sequence[Prompt]) -> float:
    """The mean reward of the best single answer given to every prompt, among the most frequent right ones; 0
    if answers are not known."""
    answers = Counter(str(prompt.metadata["answer"]) for prompt in prompts if "answer" in prompt.metadata)
    constants = [answer for answer, _ in answers.most_common(CONSTANTS)]
    if not constants:
        return 0.0
    totals = [0.0] * len(constants)
    for prompt in prompts:
        combined, _ = await pool.score(prompt.text, constants, prompt.metadata)
        totals = [total + value for total, value in zip(totals, combined, strict=True)]
    return max(totals) / len(prompts)


async def _score_model(
    settings: Settings, engine: Engine, renderer: Renderer, pool: ScorePool, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, temperature, samples in (
        ("greedy", 0.0, 1),
        ("sampled", settings.sampling.temperature, settings.eval.samples),
    ):
        if samples:
            each = await _rewards(settings, engine, renderer, pool, prompts, temperature, samples)
            result |= {kind: sum(each) / len(each), f"{kind}_each": each}
    return result


async def _rewards(
    settings: Settings,
    engine: Engine,
    renderer: Renderer,
    pool: ScorePool,
    prompts: Sequence[Prompt],
    temperature: float,
    samples: int,
) -> list[float]:
    """Mean reward of each prompt over its samples."""
    environment = make_environment(settings.environment)
    places = asyncio.Semaphore(max(1, AT_ONCE // samples))
    sampling = Sampling(
        max_tokens=settings.sampling.max_tokens,
        temperature=temperature,
        top_p=settings.sampling.top_p,
        top_k=settings.sampling.top_k,
        stop_token_ids=renderer.stop_token_ids,
    )

    async def one(index: int, prompt: Prompt) -> float:
        async with places:
            rollout = await generate_group(
                engine,
                renderer,
                environment,
                prompt,
                group=index,
                token="eval",
                n=samples,
                engine_name="eval",
                sampling=sampling,
            )
            result = await score_rollout(rollout, pool, "eval")
        if not isinstance(result, ScoredRollout):
            raise SettingsError(
                f"held-out prompt {index} could not be scored: {result.verifier}: {result.error}"
            )
        return float(result.rewards.numpy().mean())

    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(one(index, prompt), name=f"eval-{index}")
            for index, prompt in enumerate(prompts)
        ]
    return [task.result() for task in running]


def render_scores(scores: dict[str, Any]) -> str:
    """The scores for people."""
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
