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
from protocol.messages import Rollout, ScoredRollout
from services.monitor.event_tail import EventTail
from trainer.storage.archive import Archive
from trainer.storage.spool import MissingRecord, Spool

MAX_STEPS = 1000
"""Steps that are offered, the newest ones."""
MAX_GROUPS = 128
MAX_SAMPLES = 64
MAX_TEXT = 4000
"""Characters shown of a text."""
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
                    records = self._records(candidate)
                    found = _describe(candidate, records, group)
                except (TetherError, ValueError, IndexError) as error:  # damaged, or of another release
                    return _nothing(steps, f"step {candidate}: {error}")
                if found:
                    return {"steps": steps, "step": candidate, **found}
        where = (
            "no step was trained yet" if step is None else f"step {step} is not in the spool or the archive"
        )
        return _nothing(steps, where)

    def _records(self, step: int) -> Sequence[bytes]:
        """Read the encoded groups of a step: from the spool, else from the archive.

        In this order a step that the trainer moves meanwhile is not missed.
        """
        keys = self._tail.trained_groups(step)
        if keys and self._spool.is_file():
            with closing(Spool(self._spool, read_only=True)) as spool, suppress(MissingRecord):
                return spool.get_many(keys[:MAX_GROUPS])
        return [record.payload for record in self._archive.records(step)[:MAX_GROUPS]]


def _describe(step: int, records: Sequence[bytes], group: int | None) -> dict[str, Any]:
    """Return an overview of all groups and the samples of one; empty if there are no groups."""
    messages = [message for data in records if isinstance(message := decode_payload(data), ScoredRollout)]
    if not messages:
        return {}
    chosen = next((item for item in messages if item.rollout.group == group), messages[0])
    return {
        "groups": [_overview(message, step) for message in messages],
        "group": chosen.rollout.group,
        "prompt": _prompt(chosen.rollout),
        "task": _task(chosen.rollout),
        "samples": _samples(chosen, step),
    }


def _nothing(steps: list[int], reason: str) -> dict[str, Any]:
    return {"steps": steps, "step": None, "groups": [], "group": None, "samples": [], "reason": reason}


def _overview(message: ScoredRollout, step: int) -> dict[str, Any]:
    rollout, rewards = message.rollout, message.rewards.numpy()
    return {
        "group": rollout.group,
        "prompt": _prompt(rollout)[:80],
        "samples": len(rewards),
        "reward_mean": _number(rewards.mean()) if len(rewards) else None,
        "lag_max": int(step - rollout.spans.numpy()[:, 2].min()) if len(rollout.spans.numpy()) else None,
    }


def _samples(message: ScoredRollout, step: int) -> list[dict[str, Any]]:
    rollout = message.rollout
    lengths, spans, tokens = rollout.lengths.numpy(), rollout.spans.numpy(), rollout.tokens.numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)])
    found = []
    for index in range(min(len(lengths), MAX_SAMPLES)):
        if index < len(rollout.responses):
            text = rollout.responses[index]
        else:
            text = _ids(tokens[starts[index] : starts[index + 1]])
        found.append(
            {
                "reward": _number(message.rewards.numpy()[index]),
                "components": {
                    name: _number(values.numpy()[index]) for name, values in message.components.items()
                },
                "text": text[:MAX_TEXT],
                "is_cut": len(text) > MAX_TEXT,
                "tokens": int(lengths[index]),
                "finish_reason": rollout.finish_reasons[index],
                "versions": sorted({int(version) for row, _, version in spans if row == index}),
                "lags": sorted({int(step - version) for row, _, version in spans if row == index}),
            }
        )
    return found


def _prompt(rollout: Rollout) -> str:
    return rollout.prompt_text[:MAX_TEXT] or _ids(rollout.prompt_tokens.numpy())


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
