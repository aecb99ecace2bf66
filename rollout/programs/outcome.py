"""Reads a program's report about its sample."""

from typing import Any


def reward_of(fields: Any) -> float | None:
    """Return the reward of an outcome, None if verifiers score the sample.

    Raises:
        ValueError: it is no object with a `reward` that is a number or null.
    """
    try:
        reward = fields["reward"]
        return None if reward is None else float(reward)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'the outcome is not {{"reward": NUMBER}}: {error!r}'[:300]) from None
