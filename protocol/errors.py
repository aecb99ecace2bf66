"""Defines every error that crosses a boundary between two parts of tether.

    TetherError
    ├── SettingsError            the user configured something wrong; says what to do (exit code 2)
    ├── ProtocolError            bytes from outside that are not a valid message
    │   └── FrameTooLarge
    ├── Refused                  the ledger or a peer declined; nothing changed; `reason` says why
    ├── Unavailable              a required service does not answer within its deadline
    ├── SpoolError               the spool cannot be read or written (disk full ...); nothing is acknowledged
    ├── EngineError              the engine failed a request or died
    │   ├── Unsupported          the engine does not support the operation
    │   ├── EngineSettingsError  a SettingsError, too: no start with these settings can succeed
    │   └── InvalidRequest       no engine could run the request, such as one with an unknown token
    ├── EpisodeError             an episode ended without a sample (never to be read as reward 0)
    ├── WeightError              an update was not staged; the live weights are untouched
    │   ├── PoisonedError        a commit failed half-way, or the process cannot receive again; it must exit
    │   └── UnfitVersion         a SettingsError, too: no version of this trainer can be staged
    ├── RewardError              a score could not be computed (never to be read as reward 0)
    └── BoundViolation           a trained token over the bound: a bug that stops the run

A class exists only where a caller handles it differently.
"""

from enum import StrEnum


class TetherError(Exception):
    """Base of every error that tether raises on purpose."""


class SettingsError(TetherError, ValueError):
    """A setting, file or prompt that the user gave is wrong; the message says what to do."""


class ProtocolError(TetherError):
    """Bytes that are not a valid message; the receiver counts and drops them."""


class FrameTooLarge(ProtocolError):
    """A frame over the size limit, refused before it is parsed."""


class Reason(StrEnum):
    """Reason for which a transition was refused. Stable strings: logs and Lua scripts contain them."""

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
    REFUTED = "refuted"  # an audit has refuted the engine
    STALE_STEP = "stale_step"  # not the step that is running
    PENDING = "pending"  # a change of the bound waits until rule F holds with it
    BUSIER = "busier"  # a worker with fewer groups waits for the room
    DONE = "done"  # every group that the run still needs is issued
    EXHAUSTED = "exhausted"  # the prompts have run out
    DRAINING = "draining"
    HALTED = "halted"  # one reason drops too many groups
    ARCHIVE_BEHIND = "archive_behind"  # the event log is not being archived fast enough
    DUPLICATE = "duplicate"


LEASE_LOST = frozenset(
    {Reason.NOT_HELD, Reason.WRONG_STATE, Reason.UNKNOWN_GROUP, Reason.DUPLICATE, Reason.BOUND}
)
"""Refusals to extend a lease, or to accept its group: another worker has it, its group has ended, or it ran
out and there is no room for it under the bound."""


class Refused(TetherError):
    """A refused transition, without any change. Code tests `reason`; the text is for people."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Unavailable(TetherError):
    """A required service did not answer within its deadline; names the service and the time waited."""


class SpoolError(TetherError, OSError):
    """The spool could not be read or written.

    A failed write stored no message, so the messages must not be acknowledged.
    """


class EngineError(TetherError):
    """The engine failed a request or died."""


class Unsupported(EngineError):
    """The engine does not support the operation."""


class EngineSettingsError(EngineError, SettingsError):
    """An engine that cannot start with its settings, model or library: another start would end as this."""


class InvalidRequest(EngineError):
    """A request that no engine could run; a harness that made it gets the reason."""


class EpisodeError(TetherError):
    """An episode failed, or too many of a group did. It must not be counted as a reward of 0."""

    def __init__(self, reason: str, error: str) -> None:
        super().__init__(f"{reason}: {error}")
        self.reason = reason
        """A value of `rollout.episodes.FAILURES`."""
        self.error = error


class WeightError(TetherError):
    """An update could not be staged; the live weights are untouched."""


class PoisonedError(WeightError):
    """A commit failed half-way, or too many threads of this process are stuck.

    The process must exit; a new one loads a complete version.
    """


class UnfitVersion(WeightError, SettingsError):
    """A version of another model, or laid out in another way, than the engine computes with.

    Names, shapes, types and divisions come of settings: the next attempt, and the trainer's next version,
    would end as this.
    """


class RewardError(TetherError):
    """A score could not be computed. It must not be counted as a reward of 0."""


class BoundViolation(TetherError):
    """A trained token exceeds the staleness bound. Stops the run."""


def error_text(error: BaseException) -> str:
    """Return an error's text; an OSError's without number and path, which the caller's sentence names."""
    return str(getattr(error, "strerror", None) or error)


def innermost(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, or `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
