"""Defines every error that crosses a boundary between two parts of tether.

    TetherError
    ├── SettingsError            a wrong setting; the message says what to do (exit code 2)
    ├── ProtocolError            received bytes are not a valid message
    │   └── FrameTooLarge
    ├── Refused                  the ledger or a peer declined; no state changed; `reason` says why
    ├── Unavailable              a required service does not answer within its deadline
    ├── SpoolError               no access to the spool (disk full ...); no message is acknowledged
    ├── EngineError              the engine failed a request or died
    │   ├── Unsupported          the engine does not support the operation
    │   ├── EngineSettingsError  also a SettingsError: no start with these settings can succeed
    │   └── InvalidRequest       no engine could run the request, such as a request with an unknown token
    ├── EpisodeError             an episode ended without a sample (never counted as reward 0)
    ├── WeightError              a version could not be staged; the live weights are unchanged
    │   ├── PoisonedError        a commit failed half-way, or the process cannot receive again; it must exit
    │   └── UnfitVersion         also a SettingsError: no version of this trainer can be staged
    ├── RewardError              a score could not be computed (never counted as reward 0)
    └── BoundViolation           a trained token exceeds the bound: a bug that stops the run

An error has a class of its own only where a caller handles that error differently.
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
    """Reason why a transition was refused. The strings are stable: logs and Lua scripts contain them."""

    NO_RUN = "no_run"  # this ledger has no such run
    RUN_MISMATCH = "run_mismatch"  # the run was created with other prompts
    NOT_HELD = "not_held"  # the lease token is out of date
    WRONG_STATE = "wrong_state"  # the lifecycle table has no such transition
    UNKNOWN_GROUP = "unknown_group"
    BOUND = "bound"  # rule F would not hold
    NOT_ENOUGH = "not_enough"  # fewer than B groups are scored
    STRAGGLER = "straggler"  # policy wait: the step waits for an unscored group
    STALE_EPOCH = "stale_epoch"  # a newer trainer has taken over
    STALE_ENGINE = "stale_engine"  # the engine does not serve this epoch yet
    REFUTED = "refuted"  # an audit has refuted the engine
    STALE_STEP = "stale_step"  # the step is not the running step
    PENDING = "pending"  # a new bound is not in force yet: rule F does not hold with it
    BUSIER = "busier"  # a worker with fewer groups has priority
    DONE = "done"  # every group that the run still needs is leased
    EXHAUSTED = "exhausted"  # the prompts have run out
    DRAINING = "draining"
    HALTED = "halted"  # too many groups were dropped for one reason
    ARCHIVE_BEHIND = "archive_behind"  # the archive lags behind the event log
    DUPLICATE = "duplicate"


LEASE_LOST = frozenset(
    {Reason.NOT_HELD, Reason.WRONG_STATE, Reason.UNKNOWN_GROUP, Reason.DUPLICATE, Reason.BOUND}
)
"""Refusals to extend a lease or to accept its group: another worker holds the lease, the group has ended, or
the lease expired and rule F leaves no room."""


class Refused(TetherError):
    """A refused transition, without any change. Code tests `reason`; `detail` is for people."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Unavailable(TetherError):
    """A required service did not answer within its deadline; the message names service and deadline."""


class SpoolError(TetherError, OSError):
    """The spool could not be read or written.

    A failed write stores no message, so the caller must not acknowledge the messages.
    """


class EngineError(TetherError):
    """The engine failed a request or died."""


class Unsupported(EngineError):
    """The engine does not support the operation."""


class EngineSettingsError(EngineError, SettingsError):
    """An engine cannot start with its settings, model or library. A retry would fail for the same reason."""


class InvalidRequest(EngineError):
    """A request that no engine could run; the harness that sent the request receives the reason."""


class EpisodeError(TetherError):
    """An episode failed, or too many episodes of a group failed. Must not be counted as reward 0."""

    def __init__(self, reason: str, error: str) -> None:
        super().__init__(f"{reason}: {error}")
        self.reason = reason
        """A value of `rollout.episodes.FAILURES`."""
        self.error = error


class WeightError(TetherError):
    """A version could not be staged; the live weights are unchanged."""


class PoisonedError(WeightError):
    """A commit failed half-way, or too many threads of this process are stuck.

    The process must exit; a new process loads a complete version.
    """


class UnfitVersion(WeightError, SettingsError):
    """A version whose model or layout differs from the engine's.

    Names, shapes, dtypes and shards follow from the settings, so a retry and the trainer's next version would
    fail for the same reason.
    """


class RewardError(TetherError):
    """A score could not be computed. The sample must not be counted as reward 0."""


class BoundViolation(TetherError):
    """A trained token exceeds the staleness bound. Stops the run."""


def error_text(error: BaseException) -> str:
    """Return an error's text; for an OSError without number and path, which the caller's message contains."""
    return str(getattr(error, "strerror", None) or error)


def innermost(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups, or `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
