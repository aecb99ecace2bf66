"""Defines the report of one optimizer step, for the ledger, metrics.jsonl and the monitor."""

from protocol.messages.base import Message


class StepReport(Message, tag="step_report", frozen=True, kw_only=True):
    """Report of a committed step, made by the trainer.

    Times are wall-clock seconds unless the name says otherwise.
    """

    step: int
    """Number of the step, which is the version that it started from."""
    version: int
    """The version that it produced: step + 1."""
    epoch: str
    reward_mean: float
    reward_std: float = 0.0
    lag_mean: float = 0.0
    """Mean lag of trained tokens, in versions."""
    lag_max: int = 0
    lag_histogram: dict[int, int] = {}
    """Lag in versions -> trained tokens."""
    trained_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens excluded from the loss because they exceeded the staleness bound."""
    wasted_tokens: int = 0
    """Tokens of groups dropped since the last step, and masked tokens of this one."""
    groups: int = 0
    dropped_groups: int = 0
    """Groups dropped since the last step."""
    response_length_mean: float = 0.0
    """Mean tokens of a sample after the prompt, tokens inserted by an environment included."""
    loss: float = 0.0
    grad_norm: float = 0.0
    entropy: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 1.0
    logprob_error_max: float = 0.0
    """Largest |trainer log-probability - engine log-probability| over tokens of lag 0, nats."""
    generate_s: float = 0.0
    """Mean time to generate a group of this step."""
    train_s: float = 0.0
    publish_s: float = 0.0
    wait_s: float = 0.0
    """Time that the trainer waited for groups before this step."""
    pause_ms: float = 0.0
    """Longest generation pause that an engine reported for a weight update since the last step."""
    skipped: str = ""
    """Why the optimizer skipped the step (overflow ...); empty if it did not."""
    time: float = 0.0
    """Unix time of the commit, seconds."""
    engine_busy: float = 0.0
    """Mean fraction (0 to 1) of the time since the last step in which engines had requests to run, as of
    their last heartbeats."""
    batch_digest: str = ""
    """xxh3-128 (32 hex digits) of the trained batch; `tether replay` compares with it."""
