"""Finds the first step of two runs that ended with different weights, and its first difference."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from protocol.messages import Rollout
from services.settings.load import run_settings
from services.settings.resume import differences
from services.settings.resume_rules import NOT_COMPARED
from services.tools.recorded.run import RecordedRun
from trainer.step.train_command import decode_scored

MAX_SHOWN_SETTINGS = 8
"""Maximum number of settings shown."""
FIELDS = (("tokens", "token"), ("loss_mask", "mask"), ("logprobs", "log-probability"))
"""Compared values of each token, and their names."""
ValueDifference = tuple[str, str, str]
"""Name and place of a value, and its values in both runs."""


@dataclass(frozen=True, slots=True)
class RunDifference:
    """First difference between two runs."""

    step: int
    """First step that ended with different weights; both runs started it from equal weights."""
    what: str
    """Name and place of the first differing value in the step."""
    values: tuple[str, str]
    """Values in the first and in the second run."""


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare two current or ended runs step by step.

    Returns:
        `versions`: number of equal versions after the initial one; `made`: number of steps of each run;
            `settings`: differing settings; `difference`: fields of `RunDifference`, or None.

    Raises:
        SettingsError: a run has no event log, or the records of the differing step were removed.
    """
    settings = (run_settings(first), run_settings(second))
    changes = [change for change in differences(*settings) if change.dotted not in NOT_COMPARED]
    all_steps = range(max(each.run.steps for each in settings))
    runs = [RecordedRun(each, all_steps) for each in settings]
    made = [len(run.steps) for run in runs]
    step = next((step for step in range(min(made)) if len({*_digests(runs, step)}) > 1), None)
    return {
        "versions": min(made) if step is None else step,
        "made": made,
        "settings": [str(change) for change in changes],
        "difference": None if step is None else asdict(_first_difference(runs, step)),
    }


def render_comparison(facts: dict[str, Any], runs: tuple[Path, Path]) -> str:
    """Format the result of `compare_runs`."""
    made, found = facts["made"], facts["difference"]
    shown, more = facts["settings"][:MAX_SHOWN_SETTINGS], len(facts["settings"]) - MAX_SHOWN_SETTINGS
    lines = [
        f"equal up to version {facts['versions']}; steps made: {made[0]} in {runs[0]}, {made[1]} in {runs[1]}"
    ]
    if shown:
        lines.append(f"settings: {', '.join(shown)}" + (f" and {more} more" if more > 0 else ""))
    if found:
        lines.append(f"step {found['step']} differs first: {found['what']}")
        lines += [f"  {value}  in {run}" for value, run in zip(found["values"], runs, strict=True)]
    return "\n".join(lines)


def _digests(runs: Sequence[RecordedRun], step: int) -> tuple[str, str]:
    first, second = (str(run.step(step).record.digest) for run in runs)
    return first, second


def _first_difference(runs: Sequence[RecordedRun], step: int) -> RunDifference:
    """Return the first difference in a step whose weights differ."""
    for found in (_batch_differences, _record_differences, _tensor_differences):
        for what, first, second in found(runs, step):
            return RunDifference(step, what, (first, second))
    text = "the update: its batches are equal, and there is no export of both runs to compare tensors of"
    return RunDifference(step, text, _digests(runs, step))


def _batch_differences(runs: Sequence[RecordedRun], step: int) -> Iterator[ValueDifference]:
    """Yield the places of a batch at which the groups or their versions differ."""
    first, second = (
        [f"group {group.group} of version {group.version}" for group in run.step(step).record.groups]
        for run in runs
    )
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            yield f"place {place} of the batch", one, other
    if len(first) != len(second):
        yield "groups of the batch", str(len(first)), str(len(second))


def _record_differences(runs: Sequence[RecordedRun], step: int) -> Iterator[ValueDifference]:
    """Yield the differences in a step's groups, each in the order of generation."""
    for records in zip(*(run.command(step).records for run in runs), strict=True):
        first, second = map(decode_scored, records)
        for what, one, other in _rollout_differences(first.rollout, second.rollout):
            yield f"group {first.rollout.group}, {what}", one, other
        for sample, (one, other) in enumerate(
            zip(first.rewards.numpy(), second.rewards.numpy(), strict=True)
        ):
            if one != other:
                yield f"group {first.rollout.group}, sample {sample}, reward", str(one), str(other)


def _rollout_differences(first: Rollout, second: Rollout) -> Iterator[ValueDifference]:
    """Yield the differences of a group's prompt, tokens, log-probabilities and versions."""
    if first.prompt_tokens.numpy().tolist() != second.prompt_tokens.numpy().tolist():
        yield "prompt", first.prompt_text, second.prompt_text
    if len(first.lengths.numpy()) != len(second.lengths.numpy()):
        yield "rows", str(len(first.lengths.numpy())), str(len(second.lengths.numpy()))
        return
    samples = range(len(first.lengths.numpy())) if first.branches is None else first.branches.numpy()[:, 0]
    for field, name in FIELDS:
        for row, (one, other) in enumerate(zip(_rows(first, field), _rows(second, field), strict=True)):
            common_length = min(len(one), len(other))
            differing = np.flatnonzero(one[:common_length] != other[:common_length])
            if len(differing):
                place = int(differing[0])
                yield f"sample {samples[row]}, row {row}, {name} {place}", str(one[place]), str(other[place])
            elif len(one) != len(other):
                yield f"sample {samples[row]}, row {row}, length", str(len(one)), str(len(other))
    spans = (first.spans.numpy().tolist(), second.spans.numpy().tolist())
    if spans[0] != spans[1]:
        yield "versions (row, end, version)", str(spans[0]), str(spans[1])


def _rows(rollout: Rollout, field: str) -> list[NDArray[Any]]:
    """Split a field of all tokens into rows."""
    return np.split(getattr(rollout, field).numpy(), np.cumsum(rollout.lengths.numpy())[:-1])


def _tensor_differences(runs: Sequence[RecordedRun], step: int) -> Iterator[ValueDifference]:
    """Yield the differing tensors of the version after a step, if both runs exported it."""
    folders = [run.settings.run_dir / "exports" / f"step_{step + 1:08}" for run in runs]
    for path in sorted(folders[0].glob("*.safetensors")):
        if not (folders[1] / path.name).is_file():
            return
        first, second = load_file(path), load_file(folders[1] / path.name)
        for name, tensor in first.items():
            differing = (tensor != second[name]).flatten().nonzero()
            if len(differing):
                place = int(differing[0])
                what = f"{len(differing)} of {tensor.numel()} values of {name}, first {place}"
                one, other = (each.flatten()[place].item() for each in (tensor, second[name]))
                yield what, str(one), str(other)
