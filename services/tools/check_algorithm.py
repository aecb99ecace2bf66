"""Runs `tether check-algorithm`: runs a user's algorithm on a batch, without a model."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.choices import is_own
from protocol.errors import SettingsError
from services.run_record.steps import read_steps
from services.runtime.user_modules import add_user_modules
from services.settings.load import load_settings, run_settings
from services.settings.sections import Settings
from services.settings.sources import to_toml
from services.tools.recorded.run import RecordedRun
from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import make_algorithm
from trainer.step.probe import ProbeResult, probe, probe_synthetic
from trainer.step.train_command import TrainCommand, plan_command


def check_algorithm(
    name: str,
    *,
    run_dir: Path | None = None,
    step: int | None = None,
    like: str = "",
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Return facts about an algorithm's advantages, weights, loss and gradient on one batch.

    Modules are imported from the working directory and `run.modules`.

    Args:
        name: `MODULE:NAME`, or a built-in algorithm.
        run_dir: run that provides the batch; None: a small synthetic batch.
        step: step of the run; None: the newest.
        like: algorithm for comparison; empty: none.
        overrides: `section.key=value`, such as `algorithm.options.tau=0.5`.

    Raises:
        SettingsError: the algorithm cannot be loaded, raises, returns wrong shapes, or its gradient is not
            finite; or the run lacks the step.
    """
    named = [f"algorithm.name={to_toml(name)}", *([] if is_own(name) else ["algorithm.options={}"])]
    overrides = [*named, *overrides]
    settings = run_settings(run_dir, overrides) if run_dir else load_settings(None, overrides)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    add_user_modules(settings)
    command = _command(settings, step) if run_dir else None
    probe = _probed(settings, command, name)
    facts = {
        "algorithm": name,
        "batch": f"step {command.step} of {run_dir}" if command else "a made batch",
        "groups": probe.groups,
        "samples": len(probe.advantages),
        "trained_tokens": len(probe.gradient),
        "advantages": _range(probe.advantages),
        "weights": _range(probe.weights),
        "loss": probe.loss,
        "gradient_norm": float(probe.gradient.norm()),
    }
    if like:
        facts |= {"like": like, "differences": _differences(probe, _probed(settings, command, like))}
    return facts


def render_checked_algorithm(facts: dict[str, Any]) -> str:
    """Format the facts as text."""
    samples, advantages, weights = facts["samples"], facts["advantages"], facts["weights"]
    lines = [
        f"{facts['algorithm']} on {facts['batch']}: {samples} samples of {facts['groups']} groups, "
        f"{facts['trained_tokens']} trained tokens",
        f"advantages  float32 [{samples}], {advantages[0]:.4g} to {advantages[1]:.4g}",
        f"weights     float32 [{samples}], {weights[0]:.4g} to {weights[1]:.4g}",
        f"loss        {facts['loss']:.6g}",
        f"gradient    float32 [{facts['trained_tokens']}], finite, norm {facts['gradient_norm']:.4g}",
    ]
    if not any(advantages):
        lines.append("            all advantages are 0: this batch shows little; try another step")
    if "like" in facts:
        differences = ", ".join(f"{name} {value:.4g}" for name, value in facts["differences"].items())
        lines.append(f"differences from {facts['like']}, at most: {differences}")
    return "\n".join((*lines, "OK"))


def _probed(settings: Settings, command: TrainCommand | None, name: str) -> ProbeResult:
    own = settings.algorithm.options if is_own(name) else {}
    algorithm: Algorithm = make_algorithm(dataclasses.replace(settings.algorithm, name=name, options=own))
    if command is None:
        return probe_synthetic(algorithm, settings.sampling.kept_samples)
    return probe(algorithm, plan_command(command, algorithm))


def _command(settings: Settings, step: int | None) -> TrainCommand:
    """Return the command of a recorded step, the newest by default."""
    if step is None:
        steps = read_steps(settings.run_dir / "metrics.jsonl")
        if not steps:
            raise SettingsError(f"{settings.run_dir} has made no step yet; leave --run out for a made batch")
        step = steps[-1]["step"]
    return RecordedRun(settings, range(step, step + 1)).command(step)


def _range(values: torch.Tensor) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _differences(probe: ProbeResult, other: ProbeResult) -> dict[str, float]:
    """Return the largest difference of each result."""
    return {
        "advantages": _distance(probe.advantages, other.advantages),
        "weights": _distance(probe.weights, other.weights),
        "loss": abs(probe.loss - other.loss),
        "gradient": _distance(probe.gradient, other.gradient),
    }


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())
