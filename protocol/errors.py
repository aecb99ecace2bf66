"""Every error that crosses a boundary between two parts of tether.

    TetherError
    ├── SettingsError            the user configured something wrong; says what to do (exit code 2)
    ├── ProtocolError            bytes from outside that are not a message of ours
    │   ├── FrameTooLarge
    │   ├── ChecksumMismatch
    │   └── UnsupportedSchema
    ├── Refused                  the ledger or a peer declined; nothing changed; `reason` says why
    ├── Unavailable              a service that is needed does not answer within its deadline
    ├── SpoolError               the spool cannot be read or written (disk full ...); nothing is acknowledged
    ├── EngineError              the engine failed a request or died
    │   └── Unsupported          the engine cannot do this, and says so instead of pretending
    ├── WeightError              an update was not staged; the live weights are untouched
    │   └── PoisonedError        a commit broke in the middle, or the process is past receiving; it must exit
    ├── RewardError              a score could not be computed (never to be read as reward 0)
    └── BoundViolation           a trained token over the bound: a bug that stops the run

A class exists only where a caller acts differently on it.
"""

from enum import StrEnum


class TetherError(Exception):
    """Base of everything tether raises on purpose."""


class SettingsError(TetherError, ValueError):
    """A setting, file or prompt that the user gave is wrong; the message says what to do."""


class ProtocolError(TetherError):
    """Bytes that are not a valid message; the receiver counts and drops them."""


class FrameTooLarge(ProtocolError):
    """A frame over the size limit, refused before it is parsed."""


class ChecksumMismatch(ProtocolError):
    """A payload whose checksum differs from the one in its envelope."""


class UnsupportedSchema(ProtocolError):
    """An envelope of a schema version that this build does not read."""


class Reason(StrEnum):
    """Why a transition was refused. Stable strings: they appear in logs and in the Lua scripts."""

    NO_RUN = "no_run"  # the run was never created on this ledger
    RUN_MISMATCH = "run_mismatch"  # created before with other prompts
    NOT_HELD = "not_held"  # the lease token is not the current one
    WRONG_STATE = "wrong_state"  # the lifecycle table has no such row
    UNKNOWN_GROUP = "unknown_group"
    BOUND = "bound"  # rule F would not hold
    NOT_ENOUGH = "not_enough"  # fewer than B groups are scored
    STRAGGLER = "straggler"  # policy wait: the step waits for an unscored group
    STALE_EPOCH = "stale_epoch"  # a newer trainer has taken over
    STALE_ENGINE = "stale_engine"  # the engine does not serve this epoch yet
    STALE_STEP = "stale_step"  # not the step that is running
    PENDING = "pending"  # a change of the bound waits until rule F holds with it
    DONE = "done"  # every group that the run still needs is issued
    EXHAUSTED = "exhausted"  # the prompts have run out
    DRAINING = "draining"
    HALTED = "halted"  # one reason drops too many groups
    ARCHIVE_BEHIND = "archive_behind"  # the event log is not being archived fast enough
    DUPLICATE = "duplicate"


class Refused(TetherError):
    """A refusal: nothing changed. `reason` is for code, the text is for people."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Unavailable(TetherError):
    """A needed service did not answer within its deadline; names it and how long was waited."""


class SpoolError(TetherError, OSError):
    """The spool could not be read or written. A failed write stored nothing, so nothing may be
    acknowledged."""


class EngineError(TetherError):
    """The engine failed a request or died."""


class Unsupported(EngineError):
    """The engine does not support the operation."""


class WeightError(TetherError):
    """An update could not be staged; the live weights are untouched."""


class PoisonedError(WeightError):
    """A commit failed half-way, or too much is stuck in this process to go on: it must exit, and a fresh one
    loads a complete snapshot."""


class RewardError(TetherError):
    """A score could not be computed. Not a reward of 0."""


class BoundViolation(TetherError):
    """A trained token exceeds the staleness bound. Stops the run."""
