"""Reads the steps of a current or ended run from its directory: event log, spool and archive."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from protocol.errors import SettingsError
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import LoggedStep, committed_steps, read_events
from services.ledger.interface import TakenBatch
from services.run_record.steps import read_steps
from services.runtime.training import train_command
from services.runtime.user_modules import add_user_modules
from services.settings.load import FILE as SETTINGS
from services.settings.load import run_settings
from services.settings.resume import differences, earlier_name
from services.settings.resume_rules import decides_records
from services.settings.sections import Settings
from trainer.step.train_command import TrainCommand
from trainer.storage.archive import Archive
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords


class RecordedRun:
    """Steps of a current or ended run, as recorded in its directory."""

    def __init__(self, settings: Settings, steps: range) -> None:
        """Read the event log.

        Args:
            settings: settings of the run.
            steps: steps that may be requested.

        Raises:
            SettingsError: there is no log, or events are missing.
        """
        self.settings = settings
        self._by_name = {SETTINGS: settings}
        add_user_modules(settings)
        self._steps = committed_steps(read_events(settings.run_dir / FILE), steps)
        self._archive = Archive(settings.run_dir / "archive")
        self._spool = settings.run_dir / "spool.sqlite"

    def settings_of(self, step: int) -> Settings:
        """Return the settings that determined a step, which may be those of an earlier start.

        Raises:
            SettingsError: the step was never made, or its settings cannot be read.
        """
        name = self.file_of(step)
        if name not in self._by_name:
            self._by_name[name] = run_settings(self.settings.run_dir, name=name)
        return self._by_name[name]

    def file_of(self, step: int) -> str:
        """Return the name of the file with the settings of a step."""
        return earlier_name(self.settings.run_dir, self.step(step).sequence)

    def first_change(self) -> tuple[int, str] | None:
        """Return the first step whose settings differ from earlier steps, and the changes; None without one.

        Settings that change records or steps only by rounding are ignored.
        """
        first, same = None, None
        for step in sorted(self._steps):
            present = self.settings_of(step)
            first = first or present
            if present is not same and (changed := _deciding(first, present)):
                return step, changed
            same = present
        return None

    @property
    def steps(self) -> Sequence[int]:
        """Numbers of the steps in the log, oldest first."""
        return tuple(self._steps)

    def step(self, step: int) -> LoggedStep:
        """Return the record of a step in the log.

        Raises:
            SettingsError: the step was never made, or a rewind abandoned it.
        """
        if step not in self._steps:
            raise SettingsError(
                f"step {step} is not in the log of {self.settings.run_dir}: it was not made yet, or a rewind "
                "abandoned it"
            )
        return self._steps[step]

    def command(self, step: int, settings: Settings | None = None) -> TrainCommand:
        """Return the trainer's command for a step, with its records.

        Args:
            step: number of the step.
            settings: settings for the command; None: the settings of the step.

        Raises:
            SettingsError: a record is neither in the spool nor in the archive; the message has the likely
                cause.
        """
        groups = self.step(step).record.groups
        keys = [(group.group, group.token) for group in groups]
        try:
            records = self._records(step, keys)
        except MissingRecords as missing:
            held, cause = self._archive.steps(), str(missing)
            if not self._spool.is_file():  # then all groups lack their records for the same reason
                count = f"{len(missing.causes)} of its {len(keys)} groups"
                cause = f"there is no file {self._spool}, and records of {count} are missing"
            raise SettingsError(
                f"step {step} cannot be built again: {cause}. "
                f"The archive holds {f'steps {held[0]} to {held[-1]}' if held else 'no step'}; "
                "trainer.archive_mb limits its size"
            ) from None
        return train_command(settings or self.settings_of(step), TakenBatch(step, groups), records)

    def _records(self, step: int, keys: list[tuple[int, str]]) -> list[bytes]:
        """Read records from the spool, else from the archive.

        This order also finds a step that a live trainer archives during the read.
        """
        causes = {}
        if self._spool.is_file():
            with closing(Spool(self._spool, read_only=True)) as spool:
                try:
                    return spool.get_many(keys)
                except MissingRecords as error:
                    causes = error.causes
        try:
            return self._archive.get(step, keys)
        except MissingRecords as error:
            raise MissingRecords(causes or error.causes) from None

    def report(self, step: int) -> dict[str, Any]:
        """Return the step's line in metrics.jsonl; empty if its epoch has no line."""
        epoch = self.step(step).record.epoch
        lines = read_steps(self.settings.run_dir / "metrics.jsonl")
        return next((line for line in lines if (line["step"], line["epoch"]) == (step, epoch)), {})


def _deciding(old: Settings, new: Settings) -> str:
    """Return the changes that affect records or steps beyond rounding."""
    return ", ".join(str(one) for one in differences(old, new) if decides_records(one.dotted))
