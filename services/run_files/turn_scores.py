"""Describes the turns of a scored group, for readers: what each said, and what verifiers gave to it."""

from typing import Any

import numpy as np

from protocol.messages import ScoredRollout
from protocol.turns import turns_of


def describe_turns(message: ScoredRollout, max_text: int) -> dict[int, list[dict[str, Any]]]:
    """Return sample -> its turns, as JSON types; none if they were not scored.

    Args:
        message: the group.
        max_text: characters given of a turn.

    Returns:
        For each sample its turns, each with `reward`, `components` (verifier -> score), `tokens`, `text` (if
        the record has it) and `is_cut`.

    Raises:
        ProtocolError: turns contradict the rollout.
    """
    turns, rollout = turns_of(message.rollout), message.rollout
    if turns is None or message.turn_rewards is None:
        return {}
    rewards = message.turn_rewards.numpy()
    components = {name: values.numpy() for name, values in message.turn_components.items()}
    found: dict[int, list[dict[str, Any]]] = {}
    number = 0
    for sample, of_sample in enumerate(turns):
        for turn in of_sample:
            text = rollout.turn_texts[number] if rollout.turn_texts else ""
            found.setdefault(sample, []).append(
                {
                    "reward": _number(rewards[number]),
                    "components": {name: _number(values[number]) for name, values in components.items()},
                    "tokens": turn.end - turn.first,
                    "text": text[:max_text],
                    "is_cut": len(text) > max_text,
                }
            )
            number += 1
    return found


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
