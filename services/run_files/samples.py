"""Reads what the models wrote in past steps, from the spool and the archive of a run."""

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protocol.codec import decode_payload
from protocol.errors import TetherError
from protocol.messages import Remark, Rollout, ScoredRollout
from protocol.rollout_view import sample_lengths
from services.run_files.event_tail import EventTail
from services.run_files.turn_scores import describe_turns
from trainer.storage.archive import Archive
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords

MAX_STEPS = 1000
"""Steps that are offered, the newest ones."""
MAX_GROUPS = 128
MAX_SAMPLES = 64
MAX_TEXT = 4000
"""Characters that the page shows of a text."""
MAX_IDS = 200
"""Token ids shown where a record has no text."""
MAX_TASK = 500


class SampleBrowser:
    """Opens one step of a run at a time. Methods block on the disk; call them in a thread."""

    def __init__(self, run_dir: Path, tail: EventTail) -> None:
        """Read nothing yet. `tail` knows the lease tokens of steps that are not archived yet."""
        self._spool = run_dir / "spool.sqlite"
        self._archive = Archive(run_dir / "archive")
        self._tail = tail
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps that can probably be opened, in order, at most `MAX_STEPS`."""
        known = {*self._archive.steps(), *(self._tail.trained_steps() if self._spool.is_file() else ())}
        return sorted(known)[-MAX_STEPS:]

    def open(self, step: int | None, group: int | None) -> dict[str, Any]:
        """Return a step's groups and the samples of one of them.

        Args:
            step: None: the newest step whose records are there.
            group: None, or one that the step did not train: its first group.

        Returns:
            `steps` (offered), `step`, `groups` (overview of each), `group` (number), `samples`; if there is
            nothing to show, `step` is None and `reason` says why.
        """
        with self._lock:
            steps = self.steps()
            for candidate in [step] if step is not None else reversed(steps[-3:]):
                try:
                    found = _describe(candidate, self.read_step(candidate), group)
                except (TetherError, ValueError, IndexError) as error:  # damaged, or of another release
                    return _nothing(steps, f"step {candidate}: {error}")
                if found:
                    return {"steps": steps, "step": candidate, **found}
        where = (
            "no step was trained yet" if step is None else f"step {step} is not in the spool or the archive"
        )
        return _nothing(steps, where)

    def read_step(self, step: int, group: int | None = None, first: int = 0) -> list[ScoredRollout]:
        """Return `group` of a step, or its groups, at most `MAX_GROUPS` from the one at `first` on.

        Empty if their records are nowhere.

        Raises:
            TetherError: a record cannot be read; names it.
        """
        return _scored(self._records(step, group, first))

    def read_group(self, group: int, token: str) -> list[ScoredRollout]:
        """Return a group that was accepted and is not archived yet; empty if the spool does not have it."""
        return _scored(self._from_spool([(group, token)]))

    def _records(self, step: int, group: int | None, first: int) -> Sequence[bytes]:
        """Read the encoded groups of a step, or one: from the spool, else from the archive.

        In this order a step that the trainer moves meanwhile is not missed.
        """
        keys = [key for key in self._tail.trained_groups(step) if group in (None, key[0])]
        part = slice(first, first + MAX_GROUPS)
        if records := self._from_spool(keys[part]):
            return records
        return [item.payload for item in self._archive.records(step) if group in (None, item.group)][part]

    def _from_spool(self, keys: Sequence[tuple[int, str]]) -> Sequence[bytes]:
        if keys and self._spool.is_file():
            with closing(Spool(self._spool, read_only=True)) as spool, suppress(MissingRecords):
                return spool.get_many(keys)
        return []


def _scored(records: Sequence[bytes]) -> list[ScoredRollout]:
    return [message for data in records if isinstance(message := decode_payload(data), ScoredRollout)]


def _describe(step: int, messages: Sequence[ScoredRollout], group: int | None) -> dict[str, Any]:
    """Return an overview of all groups and the samples of one; empty if there are no groups."""
    if not messages:
        return {}
    chosen = next((item for item in messages if item.rollout.group == group), messages[0])
    return {"groups": [_overview(message, step) for message in messages], **describe_group(chosen, step)}


def describe_group(
    message: ScoredRollout, step: int | None, max_text: int = MAX_TEXT, max_samples: int = MAX_SAMPLES
) -> dict[str, Any]:
    """Return what a model wrote to one prompt, as JSON types.

    Args:
        message: the group.
        step: the step that trained it; None: lags are not known yet.
        max_text: characters given of a prompt and of a sample.
        max_samples: samples given.

    Returns:
        `group`, `prompt`, `task` (what the prompt source knows, as JSON), `samples`: each with `reward`,
        `components` (verifier -> score), `remarks` (what judges said of it, or of the whole group), `text`,
        `is_cut`, `tokens`, `finish_reason`, `spans` (rows of first token, token after the last, version),
        `versions`, `lags`, `branches` (of a sample with several: `tokens` of its own, `sampled` ones of
        them, `shared` tokens of the branch `parent` that it follows behind the prompt), `rows` (texts of all
        its tokens, branch by branch, where `text` is its last answer alone; else, or if they are not known,
        empty) and `turns` (those that were scored, see `describe_turns`).
    """
    return {
        "group": message.rollout.group,
        "prompt": _prompt(message.rollout, max_text),
        "task": _task(message.rollout),
        "samples": _samples(message, step, max_text, max_samples),
    }


def _nothing(steps: list[int], reason: str) -> dict[str, Any]:
    return {"steps": steps, "step": None, "groups": [], "group": None, "samples": [], "reason": reason}


def _overview(message: ScoredRollout, step: int) -> dict[str, Any]:
    rollout, rewards = message.rollout, message.rewards.numpy()
    return {
        "group": rollout.group,
        "prompt": _prompt(rollout, 80),
        "samples": len(rewards),
        "reward_mean": _number(rewards.mean()) if len(rewards) else None,
        "lag_max": int(step - rollout.spans.numpy()[:, 2].min()) if len(rollout.spans.numpy()) else None,
    }


def _samples(
    message: ScoredRollout, step: int | None, max_text: int, max_samples: int
) -> list[dict[str, Any]]:
    rollout = message.rollout
    lengths = sample_lengths(rollout)
    spans_of_samples, branches, rows = _spans(rollout), _branches(rollout), _rows(rollout)
    turns = describe_turns(message, max_text)
    found = []
    for index in range(min(len(lengths), max_samples)):
        text = rollout.responses[index]
        spans = spans_of_samples.get(index, [])
        versions = sorted({version for _, _, version in spans})
        found.append(
            {
                "reward": _number(message.rewards.numpy()[index]),
                "components": {
                    name: _number(values.numpy()[index]) for name, values in message.components.items()
                },
                "remarks": [
                    _remark(item, max_text) for item in message.remarks if item.sample in (index, -1)
                ],
                "text": text[:max_text],
                "is_cut": len(text) > max_text,
                "tokens": lengths[index],
                "finish_reason": rollout.finish_reasons[index],
                "spans": spans,
                "versions": versions,
                "lags": [] if step is None else sorted(step - version for version in versions),
                "branches": branches.get(index, []),
                "rows": _cut(rows.get(index, []), max_text),
                "turns": turns.get(index, []),
            }
        )
    return found


def _remark(remark: Remark, max_text: int) -> dict[str, Any]:
    return {
        "verifier": remark.verifier,
        "of_group": remark.sample < 0,
        "text": remark.text[:max_text],
        "tokens": remark.prompt_tokens + remark.completion_tokens,
        "cost": _number(remark.cost),
        "is_cached": remark.is_cached,
    }


def _spans(rollout: Rollout) -> dict[int, list[tuple[int, int, int]]]:
    """Return which tokens of each sample are of which version: rows (first, after the last, version).

    The branches of a sample are counted through, one after the other.
    """
    lengths = rollout.lengths.numpy().tolist()
    samples = range(len(lengths)) if rollout.branches is None else rollout.branches.numpy()[:, 0].tolist()
    starts: list[int] = []
    done: dict[int, int] = {}
    for sample, length in zip(samples, lengths, strict=True):
        starts.append(done.get(sample, 0))
        done[sample] = starts[-1] + length
    spans: dict[int, list[tuple[int, int, int]]] = {}
    before = (-1, 0)
    for row, end, version in rollout.spans.numpy().tolist():
        first = before[1] if before[0] == row else 0
        spans.setdefault(samples[row], []).append((starts[row] + first, starts[row] + end, version))
        before = row, end
    return spans


def _rows(rollout: Rollout) -> dict[int, list[str]]:
    """Return the texts of the rows of each sample, as far as they are known."""
    found: dict[int, list[str]] = {}
    samples = range(len(rollout.row_texts)) if rollout.branches is None else rollout.branches.numpy()[:, 0]
    for sample, text in zip(samples, rollout.row_texts, strict=False):
        found.setdefault(int(sample), []).append(text)
    return found


def _cut(texts: Sequence[str], most: int) -> list[str]:
    """Return texts with at most so many characters together."""
    found = []
    for text in texts:
        found.append(text[:most])
        most -= len(found[-1])
    return found


def _branches(rollout: Rollout) -> dict[int, list[dict[str, Any]]]:
    """Return the branches of each sample that has several; `parent` is one of them, None for the first."""
    if rollout.branches is None:
        return {}
    found: dict[int, list[dict[str, Any]]] = {}
    firsts: dict[int, int] = {}
    start, mask = 0, rollout.loss_mask.numpy()
    rows = zip(rollout.branches.numpy().tolist(), rollout.lengths.numpy().tolist(), strict=True)
    for row, ((sample, parent, shared), length) in enumerate(rows):
        first = firsts.setdefault(sample, row)
        found.setdefault(sample, []).append(
            {
                "tokens": length,
                "sampled": int(np.count_nonzero(mask[start : start + length])),
                "parent": None if parent < 0 else parent - first,
                "shared": shared,
            }
        )
        start += length
    return {sample: branches for sample, branches in found.items() if len(branches) > 1}


def _prompt(rollout: Rollout, max_text: int) -> str:
    return rollout.prompt_text[:max_text] or _ids(rollout.prompt_tokens.numpy())[:max_text]


def _ids(tokens: Any) -> str:
    """Return token ids as text, for records without their text."""
    if not len(tokens):
        return ""
    return "token ids " + " ".join(map(str, tokens[:MAX_IDS])) + (" ..." if len(tokens) > MAX_IDS else "")


def _task(rollout: Rollout) -> str:
    """Return what the prompt source knows of the prompt (answer, task name ...) as JSON."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        task = msgspec.msgpack.decode(rollout.metadata)
        return msgspec.json.encode(task).decode()[:MAX_TASK] if task else ""
    return ""


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
