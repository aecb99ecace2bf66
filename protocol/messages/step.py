"""What one optimizer step did. Written to the ledger with the commit, to metrics.jsonl and to the monitor."""

from protocol.messages.base import Message


class StepReport(Message, tag="step_report", frozen=True, kw_only=True):
    """One committed step. Times are seconds of wall clock unless the name says otherwise."""

    step: int
    """The step that started from version `step`."""
    version: int
    """The version that it made: step + 1."""
    epoch: str
    reward_mean: float
    reward_std: float = 0.0
    lag_mean: float = 0.0
    """Mean lag of trained tokens, in versions."""
    lag_max: int = 0
    lag_histogram: dict[int, int] = {}
    """Trained tokens for each lag."""
    trained_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens that carried no gradient because they were over the bound."""
    wasted_tokens: int = 0
    """Tokens of groups dropped since the last step, and masked tokens of this one."""
    groups: int = 0
    dropped_groups: int = 0
    """Groups dropped since the last step."""
    response_length_mean: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    entropy: float = 0.0
    clip_fraction: float = 0.0
    ratio_mean: float = 1.0
    logprob_error_max: float = 0.0
    """Largest |trainer log-probability - engine log-probability| of tokens that have lag 0."""
    generate_s: float = 0.0
    """Mean seconds that a group of this step took to generate."""
    train_s: float = 0.0
    publish_s: float = 0.0
    wait_s: float = 0.0
    """Seconds the trainer waited for groups before this step."""
    pause_ms: float = 0.0
    """Largest pause that an engine reported for an update since the last step."""
    skipped: str = ""
    """Why the optimizer did not step (overflow ...); empty if it did."""
    time: float = 0.0
    """Unix time of the commit."""
    engine_busy: float = 0.0
    """Mean share of the time since the last step in which the engines had something to generate, as of their
    last heartbeats."""
    batch_digest: str = ""
    """xxh3-128 (32 hex digits) of the batch as the trainer saw it; `tether replay` compares with it."""
