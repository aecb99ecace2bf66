"""Describes a scored group as JSON types: its prompt, samples, turns and scores."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.messages import Remark, Rollout, ScoredRollout
from protocol.rollout_view import checked_array, sample_lengths
from protocol.tensors import Array
from protocol.turns import turns_of

MAX_SAMPLES = 64
MAX_TEXT = 4000
"""Maximum number of characters of a text on the page."""
MAX_IDS = 200
"""Maximum number of token ids shown for a record without text."""
MAX_TASK = 500


def describe_group(
    message: ScoredRollout, step: int | None, max_text: int = MAX_TEXT, max_samples: int = MAX_SAMPLES
) -> dict[str, Any]:
    """Describe the samples of one prompt, as JSON types.

    Args:
        message: scored group.
        step: step that trained the group; None leaves `lags` empty.
        max_text: maximum number of characters of a prompt and of a sample.
        max_samples: maximum number of samples.

    Returns:
        `group`, `prompt`, `task` (metadata of the prompt, as JSON) and `samples`. Each sample has `reward`,
        `components` (verifier -> score), `remarks` (of judges, on the sample or the group), `text`, `is_cut`,
        `tokens`, `finish_reason`, `spans` (rows of first token, token after the last, version), `versions`,
        `lags`, `branches`, `rows` and `turns`. `branches` describes a sample with several branches: its own
        `tokens`, its `sampled` tokens, and the `shared` tokens of the branch `parent` that it continues.
        `rows` has the texts of all tokens by branch if `text` is only the last answer; else it is empty.
        `turns` is as in `describe_turns`, for groups with several turns per sample.
    """
    return {
        "group": message.rollout.group,
        "prompt": _prompt(message.rollout, max_text),
        "task": _task(message.rollout),
        "samples": _samples(message, step, max_text, max_samples),
    }


def group_overview(message: ScoredRollout, step: int) -> dict[str, Any]:
    """Return one row in the list of a step's groups."""
    rollout, rewards = message.rollout, message.rewards.numpy()
    return {
        "group": rollout.group,
        "prompt": _prompt(rollout, 80),
        "samples": len(rewards),
        "reward_mean": _number(rewards.mean()) if len(rewards) else None,
        "lag_max": int(step - rollout.spans.numpy()[:, 2].min()) if len(rollout.spans.numpy()) else None,
    }


def describe_turns(message: ScoredRollout, max_text: int) -> dict[int, list[dict[str, Any]]]:
    """Return sample -> its turns, as JSON types; empty if every sample has a single turn.

    Args:
        message: scored group.
        max_text: maximum number of characters of a turn.

    Returns:
        For each sample its turns. Each turn has `reward` and `components` (verifier -> score) if turns were
        scored, `tokens`, `text` and `context` (tokens inserted before the turn) if recorded, and `is_cut`.

    Raises:
        ProtocolError: turns contradict the rollout.
    """
    turns, rollout = turns_of(message.rollout), message.rollout
    if turns is None:
        return {}
    rewards = None if message.turn_rewards is None else message.turn_rewards.numpy()
    components = _components(rollout.group, message.turn_components, sum(map(len, turns)))
    turns_by_sample: dict[int, list[dict[str, Any]]] = {}
    number = 0
    for sample, sample_turns in enumerate(turns):
        for turn in sample_turns:
            text = rollout.turn_texts[number] if rollout.turn_texts else ""
            context = rollout.turn_contexts[number] if rollout.turn_contexts else ""
            turns_by_sample.setdefault(sample, []).append(
                {
                    "reward": None if rewards is None else _number(rewards[number]),
                    "components": {name: _number(values[number]) for name, values in components.items()},
                    "tokens": turn.end - turn.first,
                    "text": text[:max_text],
                    "context": context[:max_text],
                    "is_cut": len(text) > max_text,
                }
            )
            number += 1
    return turns_by_sample


def _samples(
    message: ScoredRollout, step: int | None, max_text: int, max_samples: int
) -> list[dict[str, Any]]:
    rollout = message.rollout
    lengths = sample_lengths(rollout)
    spans_of_samples, branches, rows = _spans(rollout), _branches(rollout), _rows(rollout)
    turns = describe_turns(message, max_text)
    components = _components(rollout.group, message.components, len(lengths))
    samples = []
    for index in range(min(len(lengths), max_samples)):
        text = rollout.responses[index]
        spans = spans_of_samples.get(index, [])
        versions = sorted({version for _, _, version in spans})
        samples.append(
            {
                "reward": _number(message.rewards.numpy()[index]),
                "components": {name: _number(values[index]) for name, values in components.items()},
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
    return samples


def _components(group: int, arrays: Mapping[str, Array], count: int) -> dict[str, NDArray[np.float32]]:
    """Return the scores of each verifier, float32 [count]. Raises ProtocolError."""
    return {
        name: checked_array(group, f"component {name}", values, "float32", (count,))
        for name, values in arrays.items()
    }


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
    """Return sample -> rows (first token, token after the last, version).

    Token positions continue across the branches of a sample.
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
    """Return sample -> texts of its rows; empty if the record has no texts of rows."""
    texts: dict[int, list[str]] = {}
    samples = range(len(rollout.row_texts)) if rollout.branches is None else rollout.branches.numpy()[:, 0]
    for sample, text in zip(samples, rollout.row_texts, strict=False):
        texts.setdefault(int(sample), []).append(text)
    return texts


def _cut(texts: Sequence[str], max_characters: int) -> list[str]:
    """Truncate texts to at most `max_characters` in total."""
    shortened = []
    for text in texts:
        shortened.append(text[:max_characters])
        max_characters -= len(shortened[-1])
    return shortened


def _branches(rollout: Rollout) -> dict[int, list[dict[str, Any]]]:
    """Return the branches of samples with several branches; `parent` is an index, None for the first."""
    if rollout.branches is None:
        return {}
    branches_by_sample: dict[int, list[dict[str, Any]]] = {}
    firsts: dict[int, int] = {}
    start, mask = 0, rollout.loss_mask.numpy()
    rows = zip(rollout.branches.numpy().tolist(), rollout.lengths.numpy().tolist(), strict=True)
    for row, ((sample, parent, shared), length) in enumerate(rows):
        first = firsts.setdefault(sample, row)
        branches_by_sample.setdefault(sample, []).append(
            {
                "tokens": length,
                "sampled": int(np.count_nonzero(mask[start : start + length])),
                "parent": None if parent < 0 else parent - first,
                "shared": shared,
            }
        )
        start += length
    return {sample: branches for sample, branches in branches_by_sample.items() if len(branches) > 1}


def _prompt(rollout: Rollout, max_text: int) -> str:
    return rollout.prompt_text[:max_text] or _ids(rollout.prompt_tokens.numpy())[:max_text]


def _ids(tokens: Any) -> str:
    """Format token ids, for records without text."""
    if not len(tokens):
        return ""
    return "token ids " + " ".join(map(str, tokens[:MAX_IDS])) + (" ..." if len(tokens) > MAX_IDS else "")


def _task(rollout: Rollout) -> str:
    """Return the metadata of the prompt (answer, task name ...) as JSON."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        task = msgspec.msgpack.decode(rollout.metadata)
        return msgspec.json.encode(task).decode()[:MAX_TASK] if task else ""
    return ""


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
