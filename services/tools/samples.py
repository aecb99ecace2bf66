"""Reads what the models of a run wrote, from its directory: for `tether samples` and `tether trace`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.lifecycle import NO_SIGNAL, GroupState
from protocol.messages import ScoredRollout
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import Moment, trace
from services.observability.printable import printable
from services.run_files.event_tail import EventTail, filtered_group
from services.run_files.samples import MAX_GROUPS, SampleBrowser, describe_group

MAX_TEXT = 1_000_000
"""Characters printed of a text."""
MAX_FILTERED = 20
"""Filtered groups printed."""
Facts = dict[str, Any]


def find_samples(run_dir: Path, step: int | None, group: int | None, limit: int) -> Facts:
    """Return the samples of a step, or of one group, as JSON types.

    Args:
        run_dir: of a run that is on or over; nothing but its files is read.
        step: None: that of the group, or the newest step whose records are there.
        group: None: all groups of the step.
        limit: samples given.

    Returns:
        `step` (None for a group that was not trained), `groups` (see `describe_group`), `left_out` (samples
        beyond the limit), `filtered` (groups that were dropped without signal since the step before, or the
        one that was asked for; see `EventTail.filtered_groups`).

    Raises:
        SettingsError: there is nothing to show; says what there is.
    """
    browser, tail = _open_browser(run_dir)
    if group is not None and step is None:
        moments = _moments(run_dir, group)
        if (filtered := _filtered(group, moments)) is not None:
            return {**_limited(None, [], limit), "filtered": [filtered]}
        step, messages = _of_moments(browser, group, moments)
    else:
        step, messages = _of_step(run_dir, browser, tail, step, group)
    if group is not None:
        chosen = [message for message in messages if message.rollout.group == group]
        if not chosen:
            known = ", ".join(str(message.rollout.group) for message in messages)
            raise SettingsError(f"step {step} did not train group {group}; its groups: {known}")
        messages = chosen
    if group is not None or step is None:
        return {**_limited(step, messages, limit), "filtered": []}
    return {**_limited(step, _all_of(browser, step, messages), limit), "filtered": tail.filtered_groups(step)}


def samples_of_trace(run_dir: Path, group: int, moments: Sequence[Moment]) -> Facts | str:
    """Return the samples of a traced group, or a sentence that says why there are none."""
    if (filtered := _filtered(group, moments)) is not None:
        return _filtered_line(filtered)
    try:
        step, messages = _of_moments(_open_browser(run_dir)[0], group, moments)
    except SettingsError as error:
        return str(error)
    return _limited(step, [item for item in messages if item.rollout.group == group], MAX_TEXT)


def _open_browser(run_dir: Path) -> tuple[SampleBrowser, EventTail]:
    tail = EventTail(run_dir)
    while tail.read_more():
        pass
    return SampleBrowser(run_dir, tail), tail


def _of_step(
    run_dir: Path, browser: SampleBrowser, tail: EventTail, step: int | None, group: int | None
) -> tuple[int, list[ScoredRollout]]:
    """Return a step with its group of that number; if it has none such, with the first of its groups."""
    steps = browser.steps()
    for candidate in [step] if step is not None else steps[::-1]:
        if messages := browser.read_step(candidate, group) or browser.read_step(candidate):
            return candidate, messages
    if not (run_dir / FILE).is_file():
        raise SettingsError(f"no run in {run_dir}: there is no {FILE}; give the directory of a run")
    if not steps:
        filtered = tail.state()["dropped_by_reason"].get(NO_SIGNAL, 0)
        raise SettingsError(
            f"no step of {run_dir} has samples yet: none was trained, or none is archived yet"
            + (f"; {filtered} groups were filtered ({NO_SIGNAL})" if filtered else "")
        )
    raise SettingsError(
        f"step {step} has no samples in {run_dir}; there are those of steps {steps[0]} to {steps[-1]}"
    )


def _moments(run_dir: Path, group: int) -> list[Moment]:
    """Return the moments of a group's life. Raises SettingsError if the log does not have it."""
    issued = -1

    def noting() -> Iterator[Any]:
        nonlocal issued
        for event in read_events(run_dir / FILE):
            issued = max(issued, getattr(event, "group", -1))
            yield event

    moments = trace(noting(), group)
    if not moments:
        known = f"groups 0 to {issued} are" if issued >= 0 else "no group is yet"
        raise SettingsError(f"group {group} is not in the log of {run_dir}; {known}")
    return moments


def _filtered(group: int, moments: Sequence[Moment]) -> Facts | None:
    """Return what is shown of a group that was dropped without signal; None of any other."""
    last = moments[-1]
    if last.state is not GroupState.DROPPED or last.facts.get("reason") != NO_SIGNAL:
        return None
    return filtered_group(group, last.facts, None)


def _of_moments(
    browser: SampleBrowser, group: int, moments: Sequence[Moment]
) -> tuple[int | None, list[ScoredRollout]]:
    """Return the step that trained a group, if one did, and the records that were found.

    Raises:
        SettingsError: there are none; says why.
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
    """Yield `messages`, the first `MAX_GROUPS` groups of a step, then its others, read a part at a time."""
    for first in count(MAX_GROUPS, MAX_GROUPS):
        yield from messages
        if len(messages) < MAX_GROUPS:
            return
        messages = browser.read_step(step, first=first)


def _limited(step: int | None, messages: Iterable[ScoredRollout], limit: int) -> Facts:
    groups: list[Facts] = []
    left, total = limit, 0
    for message in messages:
        total += len(message.rewards.numpy())
        if left > 0:
            groups.append(describe_group(message, step, MAX_TEXT, left))
            left -= len(groups[-1]["samples"])
    return {"step": step, "groups": groups, "left_out": total - sum(len(item["samples"]) for item in groups)}


def render_samples(facts: Mapping[str, Any]) -> str:
    """Return samples as text that cannot drive a terminal."""
    place = "not trained yet" if facts["step"] is None else f"step {facts['step']}"
    lines: list[str] = []
    for group in facts["groups"]:
        lines += [f"group {group['group']}, {place}", *_indented("prompt", group["prompt"])]
        lines += _indented("task", group["task"]) if group["task"] else []
        for number, sample in enumerate(group["samples"]):
            lines.append(f"  sample {number}: {_headline(sample)}")
            lines += _texts(sample)
            lines += [line for turn in enumerate(sample["turns"]) for line in _turn_lines(*turn)]
            for remark in sample["remarks"]:
                if number == 0 or not remark["of_group"]:
                    lines += [f"    {_remark_headline(remark)}", *_indented("", remark["text"])]
    if facts["left_out"]:
        lines.append(f"{facts['left_out']} more samples: see --limit and --group")
    filtered = facts.get("filtered", [])
    lines += map(_filtered_line, filtered[:MAX_FILTERED])
    if len(filtered) > MAX_FILTERED:
        lines.append(f"{len(filtered) - MAX_FILTERED} more groups were filtered: see --json")
    return "\n".join(lines)


def _headline(sample: Mapping[str, Any]) -> str:
    lags = sample["lags"]
    return (
        _scores(sample)
        + f", {sample['tokens']} tokens, {printable(sample['finish_reason'])}, "
        + _versions(sample["spans"])
        + (f", lag {lags[-1]}" if lags else "")
        + (", text cut" if sample["is_cut"] else "")
    )


def _scores(scored: Mapping[str, Any]) -> str:
    """Return the reward of a sample or a turn, and the scores that it is made of."""
    parts = [f"{name} {_number(score)}" for name, score in scored["components"].items()]
    return f"reward {_number(scored['reward'])}" + (f" ({', '.join(map(printable, parts))})" if parts else "")


def _turn_lines(number: int, turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a turn that was scored."""
    cut = ", text cut" if turn["is_cut"] else ""
    yield f"    turn {number}: {_scores(turn)}, {turn['tokens']} tokens{cut}"
    yield from _indented("", turn["text"]) if turn["text"] else ()


def _texts(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a sample, branch by branch; where that is another one than its answer, both."""
    branches, rows = sample["branches"], sample["rows"]
    for number, branch in enumerate(branches):
        follows = ""
        if branch["parent"] is not None:
            follows = f", behind {branch['shared']} of branch {branch['parent']}"
        yield f"    branch {number}: {branch['tokens']} tokens, {branch['sampled']} sampled{follows}"
        if rows:
            yield from _indented("", rows[number])
    if rows and not branches:
        yield from _indented("", rows[0])
    yield from _indented("answer" if rows else "", sample["text"])


def _filtered_line(group: Mapping[str, Any]) -> str:
    before = "" if group["step"] is None else f", before step {group['step']} was made"
    return (
        f"group {group['group']} was filtered{before} ({NO_SIGNAL}): all its rewards were "
        f"{_number(group['reward'])}, {group['tokens']} tokens; its text is not kept"
    )


def _remark_headline(remark: Mapping[str, Any]) -> str:
    return (
        f"{printable(remark['verifier'])} said"
        + (" of all samples" if remark["of_group"] else "")
        + (" (cached)" if remark["is_cached"] else "")
        + f", {remark['tokens']} tokens"
        + (f", cost {remark['cost']:.6f}" if remark["cost"] else "")
        + ":"
    )


def _versions(spans: Sequence[Sequence[int]]) -> str:
    if len(spans) == 1:
        return f"version {spans[0][2]}"
    return ", ".join(f"tokens {start}-{end - 1} of version {version}" for start, end, version in spans)


def _indented(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a text behind a bar, so that it cannot be taken for a line of ours."""
    for number, line in enumerate(islice(printable(text).split("\n"), 100_000)):
        yield f"  {name if not number else '':<6} | {line}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
