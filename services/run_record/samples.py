"""Reads the samples of past steps and of single groups from the spool and archive of a run."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

from protocol.codec import decode_payload
from protocol.errors import SettingsError, TetherError
from protocol.lifecycle import NO_SIGNAL, GroupState
from protocol.messages import ScoredRollout
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import Moment
from services.run_record.group_facts import describe_group, group_overview
from services.run_record.log_queries import filtered_group, group_moments
from services.run_record.tail import EventTail
from trainer.data.samples import check_scored
from trainer.storage.archive import Archive
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords

MAX_STEPS = 1000
"""Maximum number of steps to choose from, the newest ones."""
MAX_GROUPS = 128
"""Maximum number of a step's groups per read."""
PRINTED_TEXT = 1_000_000
"""Maximum number of printed characters of a text."""
ANY = (-math.inf, math.inf)
"""Reward range that includes all rewards."""
NEWEST = (1 << 31) - 1
"""Largest version in a span, so that records of any version are accepted."""


class SampleBrowser:
    """Opens one step of a run at a time. Methods block on the disk; call them in a thread."""

    def __init__(self, run_dir: Path, tail: EventTail) -> None:
        """Store the arguments. `tail` has the lease tokens of steps that are not archived yet."""
        self._spool = run_dir / "spool.sqlite"
        self._archive = Archive(run_dir / "archive")
        self._tail = tail
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Return the newest steps with probable records, in order, at most `MAX_STEPS`."""
        known = {*self._archive.steps(), *(self._tail.trained_steps() if self._spool.is_file() else ())}
        return sorted(known)[-MAX_STEPS:]

    def open(self, step: int | None, group: int | None, rewards: tuple[float, float] = ANY) -> dict[str, Any]:
        """Return a step's groups and the samples of one group.

        Args:
            step: number of the step; None: the newest step with records.
            group: number of the group; None, or a group of another step: the first group.
            rewards: minimum and maximum; groups and samples without such a reward are omitted.

        Returns:
            `steps` (available), `step`, `groups` (overview of each), `group` (number), `samples`. Without
            samples `reason` says why; `step` is then None, unless `rewards` excluded all samples.
        """
        with self._lock:
            steps = self.steps()
            for candidate in [step] if step is not None else reversed(steps[-3:]):
                try:
                    description = _describe(candidate, self.read_step(candidate), group, rewards)
                except TetherError as error:
                    return _nothing(steps, f"step {candidate}: {error}")
                if description:
                    return {"steps": steps, "step": candidate, **description}
        where = (
            "no step was trained yet" if step is None else f"step {step} is not in the spool or the archive"
        )
        return _nothing(steps, where)

    def read_step(self, step: int, group: int | None = None, first: int = 0) -> list[ScoredRollout]:
        """Return one `group` of a step, or at most `MAX_GROUPS` of its groups from index `first`.

        Empty if there are no records.

        Raises:
            TetherError: a record cannot be read; the message names it.
        """
        return _checked(self._records(step, group, first))

    def read_group(self, group: int, token: str) -> list[ScoredRollout]:
        """Return an accepted group that is not archived yet; empty if the spool lacks the group."""
        return _checked(self._from_spool([(group, token)]))

    def _records(self, step: int, group: int | None, first: int) -> Sequence[bytes]:
        """Read the encoded groups of a step, or one group, from the spool, else from the archive.

        This order also finds a step that the trainer archives during the read.
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


def find_samples(run_dir: Path, step: int | None, group: int | None, limit: int) -> dict[str, Any]:
    """Return the samples of a step or of one group, as JSON types.

    Args:
        run_dir: directory of a current or ended run; only files are read.
        step: None: the group's step, or the newest step with records.
        group: None: all groups of the step.
        limit: maximum number of samples.

    Returns:
        `step` (None for an untrained group), `groups` (see `describe_group`), `left_out` (number of samples
        beyond the limit), `filtered` (groups dropped without signal since the previous step, or the requested
        group; see `EventTail.filtered_groups`).

    Raises:
        SettingsError: there is no such sample; the message names the existing ones.
    """
    if group is not None and step is None:
        return samples_of_group(run_dir, group, group_moments(run_dir, group), limit)
    tail = EventTail(run_dir).read_all()
    browser = SampleBrowser(run_dir, tail)
    step, messages = _step_samples(run_dir, browser, tail, step, group)
    if group is None:
        filtered = tail.filtered_groups(step)
        return {**_limited(step, _all_of(browser, step, messages), limit), "filtered": filtered}
    chosen = [message for message in messages if message.rollout.group == group]
    if not chosen:
        known = ", ".join(str(message.rollout.group) for message in messages)
        raise SettingsError(f"step {step} did not train group {group}; its groups: {known}")
    return {**_limited(step, chosen, limit), "filtered": []}


def samples_of_group(
    run_dir: Path, group: int, moments: Sequence[Moment], limit: int = PRINTED_TEXT
) -> dict[str, Any]:
    """Return the samples of a traced group, with the fields of `find_samples`.

    Raises:
        SettingsError: there are no samples; the message says why.
    """
    last = moments[-1]
    if last.state is GroupState.DROPPED and last.facts.get("reason") == NO_SIGNAL:
        filtered = filtered_group(group, last.facts.get("reward"), last.facts["wasted_tokens"], None)
        return {**_limited(None, [], limit), "filtered": [filtered]}
    browser = SampleBrowser(run_dir, EventTail(run_dir).read_all())
    return {**_limited(*_group_history(browser, group, moments), limit), "filtered": []}


def _checked(records: Sequence[bytes]) -> list[ScoredRollout]:
    """Decode records and validate their arrays as the ingest did. Raises ProtocolError."""
    messages = [message for data in records if isinstance(message := decode_payload(data), ScoredRollout)]
    for message in messages:
        check_scored(message, NEWEST)
    return messages


def _describe(
    step: int, messages: Sequence[ScoredRollout], group: int | None, rewards: tuple[float, float]
) -> dict[str, Any]:
    """Describe the groups within the reward range and the samples of one; empty without groups."""
    if not messages:
        return {}
    low, high = rewards
    kept: Sequence[ScoredRollout] = [
        m for m in messages if ((m.rewards.numpy() >= low) & (m.rewards.numpy() <= high)).any()
    ]
    if rewards != ANY and not kept:
        reason = f"no sample of step {step} has a reward from {low:g} to {high:g}"
        return {"groups": [], "group": None, "samples": [], "reason": reason}
    kept = list(messages) if rewards == ANY else kept
    chosen = next((item for item in kept if item.rollout.group == group), kept[0])
    described = describe_group(chosen, step)
    if rewards != ANY:
        described["samples"] = [
            sample
            for sample in described["samples"]
            if sample["reward"] is not None and low <= sample["reward"] <= high
        ]
    return {"groups": [group_overview(message, step) for message in kept], **described}


def _nothing(steps: list[int], reason: str) -> dict[str, Any]:
    return {"steps": steps, "step": None, "groups": [], "group": None, "samples": [], "reason": reason}


def _step_samples(
    run_dir: Path, browser: SampleBrowser, tail: EventTail, step: int | None, group: int | None
) -> tuple[int, list[ScoredRollout]]:
    """Return a step with the requested group; if it lacks the group, with its first groups."""
    steps = browser.steps()
    for candidate in [step] if step is not None else steps[::-1]:
        if messages := browser.read_step(candidate, group) or browser.read_step(candidate):
            return candidate, messages
    next(read_events(run_dir / FILE), None)  # raises for an unreadable log, which the tail reads as empty
    if not steps:
        filtered = tail.state()["dropped_by_reason"].get(NO_SIGNAL, 0)
        raise SettingsError(
            f"no step of {run_dir} has samples yet: none was trained, or none is archived yet"
            + (f"; {filtered} groups were filtered ({NO_SIGNAL})" if filtered else "")
        )
    raise SettingsError(
        f"step {step} has no samples in {run_dir}; there are those of steps {steps[0]} to {steps[-1]}"
    )


def _group_history(
    browser: SampleBrowser, group: int, moments: Sequence[Moment]
) -> tuple[int | None, list[ScoredRollout]]:
    """Return the step that trained a group (None if untrained), and the group's records.

    Raises:
        SettingsError: there are no records; the message says why.
    """
    last = moments[-1]
    if last.state is GroupState.TRAINED:
        step = int(last.facts["step"])
        if messages := browser.read_step(step, group):
            return step, messages
        steps = browser.steps()
        kept = f"the archive holds steps {steps[0]} to {steps[-1]}" if steps else "the archive is empty"
        raise SettingsError(f"group {group} was trained in step {step}, whose records are not kept; {kept}")
    if last.state in (GroupState.SCORED, GroupState.TAKEN):
        tokens = [moment.facts["token"] for moment in moments if moment.event == "accept"]
        if tokens and (messages := browser.read_group(group, str(tokens[-1]))):
            return None, messages
    reason = f" ({last.facts['reason']})" if last.facts.get("reason") else ""
    raise SettingsError(
        f"group {group} is {last.state}{reason}: only groups that are scored or trained have samples"
    )


def _all_of(browser: SampleBrowser, step: int, messages: Sequence[ScoredRollout]) -> Iterator[ScoredRollout]:
    """Yield `messages`, the first `MAX_GROUPS` groups of a step, then its other groups, read in parts."""
    for first in count(MAX_GROUPS, MAX_GROUPS):
        yield from messages
        if len(messages) < MAX_GROUPS:
            return
        messages = browser.read_step(step, first=first)


def _limited(step: int | None, messages: Iterable[ScoredRollout], limit: int) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    remaining, total = limit, 0
    for message in messages:
        total += len(message.rewards.numpy())
        if remaining > 0:
            groups.append(describe_group(message, step, PRINTED_TEXT, remaining))
            remaining -= len(groups[-1]["samples"])
    return {"step": step, "groups": groups, "left_out": total - sum(len(item["samples"]) for item in groups)}
