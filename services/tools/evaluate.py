"""Runs `tether eval`: scores a run's initial model and its checkpoints on held-out prompts.

All models are scored on one engine and the same prompts, together with the best constant answer, by the code
that also scores versions during a run. Weights reach the engine as in training: published, staged, committed.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import EngineError, SettingsError
from reward.workers.pool import ScorePool
from rollout.prompts.base import Prompt
from services.evaluation.estimates import paired_difference
from services.evaluation.scoring import Scorer, SetScores, evaluation_of, open_scorer
from services.run_record.evaluations import Evaluation, describe_scores
from services.runtime.event_loop import run_loop
from services.runtime.user_modules import add_user_modules
from services.serving.exports import check_model_directory, newest_export, publish_model
from services.settings.evaluation import HeldOutSets, read_sets
from services.settings.hub import fetch_model
from services.settings.sections import Settings
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender


@contextlib.contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Append stdout and stderr of the block to a file, including output of processes started in it.

    Redirects the file descriptors, because engines print from threads, from C and from child processes that
    may outlive the block.

    Raises:
        SettingsError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, saved in zip((1, 2), copies, strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        os.close(file)


CONSTANTS = 50
"""Number of most frequent held-out answers that are tried as a constant answer."""
KINDS = ("greedy", "sampled")


def score_run(settings: Settings, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Return the scores as `evaluate_run`; engines and libraries write to RUN_DIR/logs/eval.log.

    Raises:
        SettingsError, EngineError: as `evaluate_run`; for an `EngineError` the path of the log is printed.
    """
    for checkpoint in checkpoints:  # fails before the log is opened and an engine started
        check_model_directory(checkpoint)
    log = settings.run_dir / "logs/eval.log"
    try:
        with redirect_output(log):
            return run_loop(evaluate_run(settings, checkpoints))
    except EngineError:
        print(f"tether: engine output: {log}", file=sys.stderr)
        raise


async def evaluate_run(settings: Settings, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Score the initial model and `checkpoints` (by default the newest export) on the held-out sets.

    Returns:
        {"sets": [{"set", "prompts": n, "best_constant": score, "models": [{"model", ...}]}]}, merged with the
        entries of the first set. `best_constant` is None if only the environment gives rewards. A model has
        the measured fields of `Evaluation`. Each model after the first also has its mean gain over the first,
        paired by prompt, with its standard error.

    Raises:
        SettingsError: there are no held-out prompts or no checkpoint.
        EngineError: the engine failed.
    """
    add_user_modules(settings)
    sets = await asyncio.to_thread(read_sets, settings)
    initial = await asyncio.to_thread(fetch_model, settings)
    models = [initial, *(checkpoints or [newest_export(settings.run_dir)])]
    async with open_scorer(settings, "eval") as scorer:
        pool = scorer.pool if settings.reward.verifiers else None
        constants = {name: await best_constant(pool, prompts) for name, prompts in sets.items()}
        scored = await _score_models(settings, scorer, sets, models)
    set_scores = []
    for name, prompts in sets.items():
        entries = [
            {"model": str(model), **_fields(by_set[name][0])}
            for model, by_set in zip(models, scored, strict=True)
        ]
        add_gains(entries, [by_set[name][1] for by_set in scored])
        set_scores.append(
            {"set": name, "prompts": len(prompts), "best_constant": constants[name], "models": entries}
        )
    return {**set_scores[0], "sets": set_scores}


async def _score_models(
    settings: Settings, scorer: Scorer, sets: HeldOutSets, models: Sequence[Path]
) -> list[dict[str, tuple[Evaluation, SetScores]]]:
    """Return the scores of each model on each set."""
    scored = []
    with tempfile.TemporaryDirectory(prefix="tether-eval-") as directory:
        sender = disk_sender(WeightConfig(directory=directory), Path(directory))
        try:
            for version, model in enumerate(models):
                dtype = settings.engine.dtype
                manifest = await asyncio.to_thread(publish_model, sender, model, "eval", version, dtype)
                await scorer.serve(manifest)
                by_set = {}
                for name, prompts in sets.items():
                    scores = await scorer.score(prompts)
                    by_set[name] = evaluation_of(settings, manifest, name, scores), scores
                scored.append(by_set)
        finally:
            sender.close()
    return scored


def _fields(evaluation: Evaluation) -> dict[str, Any]:
    """Return the measured fields of an evaluation, without those that describe a version of a run."""
    known = msgspec.to_builtins(evaluation, str_keys=True)
    left_out = ("version", "step", "epoch", "set")
    return {
        name: value for name, value in known.items() if value not in (None, "", {}) and name not in left_out
    }


def add_gains(entries: Sequence[dict[str, Any]], scores: Sequence[SetScores]) -> None:
    """Add to each entry after the first its gain over the first, a mean over prompts scored by both.

    The fields are `KIND_gain` and, with two prompts or more, its standard error `KIND_gain_stderr`.
    """
    for kind in KINDS:
        for entry, after in zip(entries[1:], scores[1:], strict=True):
            pairs = [
                (new.mean, old.mean)
                for new, old in zip(getattr(after, kind), getattr(scores[0], kind), strict=True)
                if not (new.error or old.error)
            ]
            if pairs:
                gain, stderr = paired_difference(*zip(*pairs, strict=True))
                entry[f"{kind}_gain"] = gain
                if stderr is not None:
                    entry[f"{kind}_gain_stderr"] = stderr


async def best_constant(pool: ScorePool | None, prompts: Sequence[Prompt]) -> float | None:
    """Return the highest mean reward of one constant answer to all prompts.

    Tries the `CONSTANTS` most frequent correct answers. Returns 0 if the prompts have no answers, None
    without verifiers.
    """
    if pool is None:
        return None
    answers = Counter(str(prompt.metadata["answer"]) for prompt in prompts if "answer" in prompt.metadata)
    constants = [answer for answer, _ in answers.most_common(CONSTANTS)]
    if not constants:
        return 0.0
    totals = [0.0] * len(constants)
    for prompt in prompts:
        rewards = (await pool.score(prompt.text, constants, prompt.metadata)).rewards
        totals = [total + value for total, value in zip(totals, rewards, strict=True)]
    return max(totals) / len(prompts)


def render_scores(scores: dict[str, Any]) -> str:
    """Format the scores: a line per set and per model."""
    lines = []
    for score in scores["sets"]:
        named = "held-out prompts" if len(scores["sets"]) == 1 else f"held-out set {score['set']}"
        constant = score["best_constant"]
        lines.append(
            f"{named}: {score['prompts']}"
            + ("" if constant is None else f", best constant answer: {constant:.3f}")
        )
        lines += [f"{entry['model']}: {_render_model(entry)}" for entry in score["models"]]
    return "\n".join(lines)


def _render_model(entry: dict[str, Any]) -> str:
    parts = describe_scores(msgspec.convert({"version": 0, "set": "", **entry}, Evaluation, str_keys=True))
    for kind in KINDS:
        if f"{kind}_gain" in entry:
            gain, stderr = entry[f"{kind}_gain"], entry.get(f"{kind}_gain_stderr")
            error = "" if stderr is None else f" (standard error {stderr:.3f})"
            parts.append(f"{kind} gain {gain:+.3f}{error}")
    if entry.get("failed"):
        parts.append(f"{entry['failed']} prompts not scored ({entry['error']})")
    return ", ".join(parts)
