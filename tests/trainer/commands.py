"""Commands of steps, as the trainer's service gives them to its ranks."""

from collections.abc import Sequence
from typing import Any

from trainer.step.train_command import TrainCommand


def train_command(step: int, records: Sequence[bytes], *, bound: int = 1, **changes: Any) -> TrainCommand:
    """A step of encoded scored rollouts under one bound; `changes`: other fields than a plain step has."""
    plain = {
        "mask_late": True, "temperature": 1.0, "recompute_logprobs": False, "reference_logprobs": False,
    }  # fmt: skip
    return TrainCommand(step=step, records=list(records), bounds=[bound] * len(records), **(plain | changes))
