"""Holds the entropy bonus of a run with a target, from step to step and in checkpoints."""

import dataclasses
import json
from pathlib import Path

from protocol.errors import SettingsError
from trainer.backends.base import StepStats
from trainer.config import AlgorithmConfig
from trainer.functional.entropy_target import EntropyBonus
from trainer.storage.host_state import HostState

FILE = "entropy.json"
"""File of a checkpoint; rank 0 writes it, and every rank reads it."""


class EntropyControl:
    """The bonus of the next step; the same on every rank, as the statistics that it follows are."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Begin with the bonus of the first step."""
        self._config = config
        self.bonus = EntropyBonus.first(config)

    def note(self, updates: list[StepStats]) -> None:
        """Follow the measurements of a step's updates; the mean over their tokens counts."""
        measured = [u for u in updates if u.entropy is not None]
        tokens = sum(u.trained_tokens for u in measured)
        total = sum((u.entropy or 0.0) * u.trained_tokens for u in measured)
        self.bonus = self.bonus.after(total / tokens if tokens else None, self._config)

    def added_to(self, state: HostState) -> HostState:
        """Return rank 0's part of a checkpoint with the bonus."""
        text = json.dumps(dataclasses.asdict(self.bonus))
        return dataclasses.replace(state, texts={**state.texts, FILE: text})

    def restore(self, directory: Path) -> None:
        """Read the bonus of a checkpoint; one that was made without a target leaves the first step's bonus.

        Raises:
            SettingsError: the file is damaged.
        """
        path = directory / FILE
        if not path.is_file():
            self.bonus = EntropyBonus.first(self._config)
            return
        try:
            self.bonus = EntropyBonus(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"checkpoint {directory}: {FILE} is damaged: {error}") from error
