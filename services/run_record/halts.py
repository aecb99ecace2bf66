"""Explains why a run halted: the cause, the logs with details, and the remedy."""

from collections.abc import Mapping

from protocol.lifecycle import NO_SIGNAL

RULE = "more than `bound.drop_share` of the last `bound.drop_window` finished groups"
RULES = {NO_SIGNAL: "`algorithm.max_filtered_batches` batches of them since the last step"}
"""Drop reason with its own limit -> the limit."""
RESTART_REMEDY = "then start the same command again, which continues from the last step"

_CAUSES: Mapping[str, tuple[str, str, str]] = {
    "attempts": (
        "groups used up their `bound.max_attempts` leases",
        "logs/rollout.*.log and logs/reward.*.log",
        "fix what fails there",
    ),
    "reward": (
        "the rewards of groups could not be computed",
        "logs/reward.*.log",
        "fix the verifier, or raise reward.timeout_s if it is slow",
    ),
    "prompt": (
        "prompts are longer than render.max_prompt_tokens, or cannot be rendered or generated",
        "logs/rollout.*.log",
        "fix the prompts or [render], or shorten them to fit engine.max_model_len",
    ),
    "engine": (
        "the engine failed to generate groups",
        "logs/rollout.*.log (group.failed)",
        "fix the engine or its settings",
    ),
    "episode": (
        "too many samples of a group failed in the environment",
        "logs/rollout.*.log (episode.failed)",
        "fix the environment, or raise environment.call_s and episode_s if it is slow",
    ),
    "stale": (
        "groups had no token left within the staleness bound when they were scored",
        "`tether monitor`",
        "raise bound.max_staleness, add rollout or reward workers, or lower sampling.max_tokens",
    ),
    "straggler": (
        "groups took longer to generate than the staleness bound allows",
        "`tether monitor`",
        "set bound.staleness_policy to mask, raise bound.max_staleness, or lower sampling.max_tokens",
    ),
    NO_SIGNAL: (
        "groups were filtered: their rewards were all equal, or algorithm.group_filter kept them out",
        "`tether monitor`, and `tether samples` for steps before",
        "choose prompts that are neither too easy nor too hard (prompts.min_pass_rate), draw more samples of "
        "each, correct the reward or the filter, or raise the limit",
    ),
    "lost": (
        "records of groups were lost from the spool",
        "logs/ingest.log",
        "check the disk of the run directory",
    ),
}
"""Drop reason, or underlying error -> cause, place of details, remedy."""
_BY_SETTING = ("stale", "straggler", NO_SIGNAL)
"""Drop reasons that result from settings."""


def describe_halt(halted: str) -> str:
    """Return why a run halted; `halted` is a drop reason (one word) or a trainer's cause (a sentence)."""
    if " " in halted:
        return halted
    if halted == NO_SIGNAL:
        return "too many groups since the last step were filtered (algorithm.filter_groups)"
    return f"too many of the last groups were dropped for the reason {halted!r}"


def explain_halt(reason: str, details: Mapping[str, int] | None = None) -> str:
    """Return why a run halted, the place of details and the remedy, as one line.

    Args:
        reason: drop reason (one word), or cause from the trainer (a sentence).
        details: underlying error of drops (`reward:NAME: ERROR`, `episode: ERROR` ...) -> count. The most
            frequent error is named; it is the cause of `attempts`.
    """
    if " " in reason:
        return f"the run halted: {reason}; fix the cause, {RESTART_REMEDY}"
    counts = {
        name: count
        for name, count in (details or {}).items()
        if reason in ("attempts", name.partition(":")[0])
    }
    kind, _, error = max(counts, key=lambda name: counts[name], default=reason).partition(":")
    cause, place, remedy = _CAUSES.get(
        kind, (f"groups were dropped for the reason {reason!r}", "the logs", "fix the cause")
    )
    if kind in _CAUSES:
        cause += f" ({'verifier ' if kind == 'reward' else ''}{error.strip()})" if error else ""
        cause += "" if kind == reason else ", in all attempts"
    return (
        f"the run halted for the reason {reason!r}: {cause}, {RULES.get(reason, RULE)}; see {place}; "
        f"{remedy}, {RESTART_REMEDY}"
    )


def explain_drops(counts: Mapping[str, int]) -> list[str]:
    """Return a sentence with cause, place and remedy for each unintended drop reason in `counts`."""
    return [
        f"groups left out for the reason {reason!r}: {count}; {cause}; see {place}; {remedy}"
        for reason, count in counts.items()
        if count and reason not in _BY_SETTING
        for cause, place, remedy in [_CAUSES.get(reason, ("they failed", "the logs", "fix the cause"))]
    ]
