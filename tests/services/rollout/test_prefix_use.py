"""Prompts are counted by call and by where their KV came from."""

from rollout.episodes import EpisodeReport, PromptTokens
from services.rollout.prefix_use import PrefixUse


def test_hit_rate_is_of_first_and_later_calls_together() -> None:
    use = PrefixUse()
    assert use.hit_rate is None
    first, later = PromptTokens(10, 4), PromptTokens(90, 71)
    use.add(EpisodeReport(0, 0, 3, 12, 0.5, first_prompt=first, later_prompts=later))
    use.add(EpisodeReport(1, 0, 0, 0, 0.5, failure="call_s"))
    assert use.tokens() == {
        ("first", "cache"): 4,
        ("first", "computed"): 6,
        ("later", "cache"): 71,
        ("later", "computed"): 19,
    }
    assert use.hit_rate == 0.75
