"""Defines a simulated run: sizes, durations and the rates of faults."""

from dataclasses import dataclass

from protocol.staleness import Bound, Policy


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes, times in virtual milliseconds, and probabilities (shares)."""

    groups: int = 1000
    """Prompts; the run ends when each of them is trained or dropped."""
    seed: int = 0
    max_staleness: int = 1
    groups_per_step: int = 8
    policy: Policy = Policy.MASK

    engines: int = 6
    slots: int = 4
    """Groups that an engine generates at a time."""
    slow_engines: int = 1
    """So many of the engines are `slowness` times slower, in generating and in applying weights."""
    slowness: float = 8.0
    generate_ms: float = 10_000
    """Shortest generation; durations are Pareto."""
    tail: float = 1.3
    """Exponent of the Pareto law: below 2 the variance has no bound, below 1 the mean."""
    samples: int = 1
    """Samples of a group, each of a duration of its own; the group takes as long as the slowest."""
    keep_first: int = 0
    """Samples after which a group is complete; 0: all."""
    longest: float = 1000.0
    """Durations are cut off at so many times the shortest."""
    token_ms: int = 250
    score_ms: float = 1000
    apply_ms: float = 2000
    step_ms: float = 4000
    lease_ms: int = 120_000
    poll_ms: int = 60_000
    """How long an engine or the trainer that was refused waits before it asks again, if nothing wakes it."""

    life_ms: float = 3_600_000
    """Mean life of an engine; it dies without a word."""
    down_ms: float = 120_000
    hang_share: float = 0.003
    """Holders that stop extending their lease, and finish all the same."""
    fail_share: float = 0.01
    """Scores that fail: the group is released."""
    filter_share: float = 0.005
    """Scored groups that a filter drops."""
    no_signal_share: float = 0.0
    """Groups whose rewards are all equal: they are filtered instead of accepted."""
    lost_share: float = 0.001
    """Scored groups whose record is lost."""
    crash_share: float = 0.003
    """Steps in which the trainer dies after its take."""
    rewind_share: float = 0.3
    """Crashes after which its weights come out different, so that the run is rewound."""
    change_share: float = 0.002
    """Steps after which E, B or both are changed."""
    policy_changes: bool = False
    """Whether the policy is changed too."""
    repeat_share: float = 0.01
    """Calls whose answer is lost, so that they are made again."""
    checkpoint_steps: int = 5
    publish_every: int = 1
    """Versions from one that engines get to the next; 0: only the bound asks for one."""

    @property
    def bound(self) -> Bound:
        return Bound(self.max_staleness, self.groups_per_step, self.policy)
