"""Tests what is drafted from earlier answers, and when drafts are made."""

from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.draft_history import MATCHED, DraftHistory
from rollout.engines.draft_switch import BLOCK, DraftSwitch

PROMPT = (1, 2, 3, 4)
ANSWER = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_an_answer_that_begins_like_an_earlier_one_is_drafted_to_go_on_like_it() -> None:
    history = DraftHistory()
    first = history.begin(PROMPT)
    first.extend(ANSWER)
    first.end()
    again = history.begin(PROMPT)
    again.extend(ANSWER[:1])
    assert again.draft(8) == ANSWER[1:6]  # the match is the whole prompt and a token
    again.extend(ANSWER[1:4])
    assert again.draft(8) == ANSWER[4:]
    assert again.draft(3) == ANSWER[4:7]
    assert len(again) == 4


def test_a_running_sibling_is_drafted_from_as_far_as_it_has_come() -> None:
    history = DraftHistory()
    ahead, behind = history.begin(PROMPT), history.begin(PROMPT)
    ahead.extend(ANSWER)
    behind.extend(ANSWER[:1])
    assert behind.draft(2) == ANSWER[1:3]


def test_an_answer_that_repeats_its_prompt_or_itself_is_drafted_from_there() -> None:
    history = DraftHistory()
    request = history.begin((*range(100, 120), 7))
    request.extend([103, 104, 105])
    assert request.draft(8) == [106, 107, 108]
    request.extend([50, 51, 52, *range(60, 70), 50, 51, 52])
    assert request.draft(2) == [60, 61]


def test_answers_to_another_prompt_are_no_drafts() -> None:
    history = DraftHistory()
    history.begin(PROMPT).extend(ANSWER)
    other = history.begin((9, 9, 9))
    other.extend(ANSWER[:5])
    assert other.draft(8) == []


def test_prompts_used_last_are_kept_within_the_limit() -> None:
    history = DraftHistory(kept_tokens=2000)
    for prompt in range(256):
        request = history.begin((prompt,) * 4)
        request.extend([prompt + 1000, *range(100)])
        request.end()
    old, new = history.begin((0,) * 4), history.begin((255,) * 4)
    old.extend([1000])
    new.extend([1255])
    assert old.draft(4) == []
    assert new.draft(4) == [0, 1, 2, 3]


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6), st.integers(1, 8))
def test_a_draft_is_what_followed_the_same_tokens_somewhere(answers: list[list[int]], most: int) -> None:
    history, prompt = DraftHistory(), (0, 1, 2, 3, 0, 1)
    written = [list(prompt)]
    for answer in answers:
        request = history.begin(prompt)
        written.append([*prompt])
        for token in answer:
            request.extend([token])
            written[-1].append(token)
            draft = request.draft(most)
            assert len(draft) <= most
            wanted = [*written[-1][-MATCHED:], *draft]
            places = ([row[i : i + len(wanted)] for i in range(len(row))] for row in written)
            assert not draft or any(wanted in found for found in places)
        request.end()


class Machine:
    """Steps of which each takes a second, or more with drafts, and gives a token a request, or more."""

    def __init__(self) -> None:
        self._now = 0.0
        self._switch, self._drafts = DraftSwitch(lambda: self._now), True

    def share_drafted(
        self, running: int, *, seconds: float, tokens: float, steps: int = 200 * BLOCK
    ) -> float:
        """Return the share of steps with drafts, if those take so long and give so many tokens a request."""
        made = 0
        for _ in range(steps):
            self._now += seconds if self._drafts else 1.0
            self._drafts = self._switch.drafts(running, round(running * (tokens if self._drafts else 1)))
            made += self._drafts
        return made / steps


def test_drafts_are_made_where_they_give_more_tokens_a_second() -> None:
    assert Machine().share_drafted(8, seconds=1.1, tokens=2) > 0.9
    assert Machine().share_drafted(8, seconds=1.5, tokens=1.25) < 0.1


def test_the_choice_is_one_of_each_size_of_batch() -> None:
    machine = Machine()
    assert machine.share_drafted(2, seconds=1.1, tokens=2) > 0.9
    assert machine.share_drafted(200, seconds=3.0, tokens=2) < 0.1
    assert machine.share_drafted(2, seconds=1.1, tokens=2, steps=10 * BLOCK) > 0.8


def test_a_wait_for_requests_changes_no_choice() -> None:
    machine = Machine()
    for _ in range(10):
        assert machine.share_drafted(8, seconds=1.1, tokens=2, steps=30 * BLOCK) > 0.9
        machine.share_drafted(8, seconds=500.0, tokens=2, steps=1)
