"""Formats the samples of a run as text, for `tether samples` and `tether trace`."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.lifecycle import NO_SIGNAL
from services.ledger.event_log.trace import Moment, render_trace
from services.observability.printable import printable
from services.run_record.call_audit import call_facts, calls_of_group, render_calls
from services.run_record.log_queries import group_moments
from services.run_record.samples import samples_of_group

MAX_FILTERED = 20
"""Maximum number of filtered groups printed."""


def trace_group(run_dir: Path, group: int) -> tuple[list[dict[str, Any]], Callable[[], str]]:
    """Return a group's events and calls, and a function that formats them with the group's samples."""
    moments = group_moments(run_dir, group)
    calls = calls_of_group(run_dir, group)

    def render() -> str:
        samples = render_group_samples(run_dir, group, moments)
        return f"{render_trace(group, moments)}\n{render_calls(calls)}{samples}"

    return [*map(dataclasses.asdict, moments), *call_facts(calls)], render


def render_group_samples(run_dir: Path, group: int, moments: Sequence[Moment]) -> str:
    """Format the samples of a traced group, or a sentence that says why there are none."""
    try:
        return render_samples(samples_of_group(run_dir, group, moments))
    except SettingsError as error:
        return str(error)


def render_samples(facts: Mapping[str, Any]) -> str:
    """Format samples as text that cannot control the terminal."""
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
    """Format the reward of a sample or a turn, and its components."""
    parts = [f"{name} {_number(score)}" for name, score in scored["components"].items()]
    return f"reward {_number(scored['reward'])}" + (f" ({', '.join(map(printable, parts))})" if parts else "")


def _turn_lines(number: int, turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a turn of the model, after the context inserted before it."""
    if turn["context"].strip():
        yield "    before it:"
        yield from _indented("", turn["context"])
    cut = ", text cut" if turn["is_cut"] else ""
    scores = f"{_scores(turn)}, " if turn["reward"] is not None else ""
    yield f"    turn {number}: {scores}{turn['tokens']} tokens{cut}"
    yield from _indented("", turn["text"]) if turn["text"] else ()


def _texts(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a sample by branch, and its answer if that differs."""
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
    if all(turn["text"] for turn in sample["turns"]) and len(sample["turns"]) > 1 and not rows:
        return  # the turns contain the same text, with speakers
    yield from _indented("answer" if rows else "", sample["text"])


def _filtered_line(group: Mapping[str, Any]) -> str:
    before = "" if group["step"] is None else f", before step {group['step']} was made"
    return (
        f"group {group['group']} was filtered{before} ({NO_SIGNAL}): its mean reward was "
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
    """Yield the lines of a text with a bar in front, which distinguishes them from tether's own lines.

    A blank text is described instead.
    """
    if not text.strip():
        yield f"  {name:<6}   {'empty' if not text else f'blank: {json.dumps(text)}'}"
        return
    for number, line in enumerate(islice(printable(text).split("\n"), 100_000)):
        yield f"  {name if not number else '':<6} | {line}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
