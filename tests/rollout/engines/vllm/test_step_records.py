"""Tests the record of the tokens that vLLM's scheduler accepts, and which answers leave with them."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engines.requests import spans_from_marks
from rollout.engines.vllm.step_records import ENTRY_BYTES, RECORD, SampledTokens, StepResult


class Steps:
    """A scheduler's requests, as vLLM has them, and the record of their tokens."""

    def __init__(self, kept_bytes: int = 1 << 20) -> None:
        self.sampled = SampledTokens(kept_bytes)
        self._tokens: dict[str, list[int]] = {}

    def begin(self, *names: str, waits: bool = True) -> None:
        for name in names:
            tokens = self._tokens[name] = []
            request = SimpleNamespace(request_id=name, output_token_ids=tokens)
            self.sampled.begin(request, waits=waits)

    def step(
        self,
        version: int,
        accepted: Mapping[str, Sequence[int]],
        logprobs: Sequence[float],
        starts: Sequence[int] | None = None,
        **fields: Any,
    ) -> list[Any]:
        """Accept tokens of each row; `fields` are the same in all answers."""
        rows = {name: row for row, name in enumerate(accepted)}
        answers = []
        for name, tokens in accepted.items():
            self._tokens.get(name, []).extend(tokens)
            if tokens:  # of a prompt that is not complete there is no answer
                bare = {"finish_reason": None, "prefill_stats": None, "routed_experts": None}
                answers.append(
                    SimpleNamespace(
                        **bare | fields,
                        request_id=name,
                        new_token_ids=list(tokens),
                        kv_transfer_params=None,
                    )
                )
        result = StepResult(version, np.array(logprobs, np.float32), starts)
        return self.sampled.add(result, rows, answers)

    def fetched(self, number: str) -> tuple[list[int], list[float], Any]:
        """Tokens, log-probabilities and spans of a request."""
        ids, logprobs, marks = self.sampled.pop(number) or pytest.fail(f"nothing of {number}")
        tokens = np.frombuffer(ids, np.int32).tolist()
        return tokens, np.frombuffer(logprobs, np.float32).tolist(), spans_from_marks(marks, len(tokens))


def test_tokens_have_the_version_of_their_step_though_its_result_comes_after_a_commit() -> None:
    steps = Steps()
    steps.begin("a", "b")
    steps.step(1, {"a": [7]}, [-0.5])
    steps.step(2, {"a": [8], "b": [9]}, [-0.25, -1.0])
    steps.step(2, {"a": [3], "b": []}, [-0.125, -2.0])
    assert steps.fetched("a") == ([7, 8, 3], [-0.5, -0.25, -0.125], ((1, 1), (3, 2)))
    assert steps.fetched("b") == ([9], [-1.0], ((1, 2),))


def test_request_that_began_before_a_commit_has_the_version_of_its_first_token() -> None:
    steps = Steps()
    steps.begin("a:x-1f")
    steps.step(1, {"a:x-1f": [7]}, [-0.5])
    steps.begin("b:x-2f")
    steps.step(2, {"a:x-1f": [8], "b:x-2f": []}, [-0.5, -0.5])
    steps.step(3, {"a:x-1f": [9], "b:x-2f": [4]}, [-0.5, -0.5])
    assert steps.fetched("a")[2] == ((1, 1), (2, 2), (3, 3))
    assert steps.fetched("b")[2] == ((1, 3),)


def test_tokens_that_the_scheduler_discards_have_no_log_probability() -> None:
    steps = Steps()
    steps.begin("a", "b")
    steps.step(1, {"a": [7], "b": [1]}, [-0.5, -1.0])
    steps.step(1, {"a": [], "b": [2]}, [-8.0, -2.0])  # a step in flight as the request was put back
    steps.step(1, {"a": [9], "b": [3]}, [-0.25, -3.0])
    assert steps.fetched("a") == ([7, 9], [-0.5, -0.25], ((2, 1),))


def test_accepted_drafts_have_the_first_log_probabilities_of_their_row() -> None:
    steps = Steps()
    steps.begin("a", "b")
    steps.step(1, {"a": [7, 8], "b": [1]}, [-0.5, -1.0, -9.0, -2.0, -9.0], starts=[0, 3])
    assert steps.fetched("a")[:2] == ([7, 8], [-0.5, -1.0])
    assert steps.fetched("b")[:2] == ([1], [-2.0])


def test_answers_between_the_first_and_the_last_token_stay_and_the_last_has_all_and_their_record() -> None:
    steps = Steps()
    steps.begin("a")
    (first,) = steps.step(1, {"a": [7]}, [-0.5], prefill_stats="cached")
    assert first.new_token_ids == [7]
    assert steps.step(1, {"a": [8]}, [-0.25]) == steps.step(2, {"a": [9]}, [-1.0]) == []
    (last,) = steps.step(2, {"a": [3]}, [-2.0], finish_reason="length")
    assert last.new_token_ids == [8, 9, 3]
    logprobs, marks = last.kv_transfer_params[RECORD]
    assert np.frombuffer(logprobs, np.float32).tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert spans_from_marks(marks, 4) == ((2, 1), (4, 2))


@pytest.mark.parametrize("fields", [{"routed_experts": "experts"}, {}])
def test_answers_that_are_wanted_at_each_token_leave_at_once(fields: dict[str, str]) -> None:
    steps = Steps()
    steps.begin("a", waits=bool(fields))
    assert [steps.step(1, {"a": [token]}, [-0.5], **fields)[0].new_token_ids for token in (7, 8)] == [
        [7],
        [8],
    ]
    assert steps.fetched("a")[0] == [7, 8]


def test_request_that_was_fetched_is_not_recorded_any_more() -> None:
    steps = Steps()
    steps.begin("a")
    steps.step(1, {"a": [7]}, [-0.5])
    assert steps.fetched("a")[0] == [7]
    steps.step(1, {"a": [8]}, [-0.5])
    assert steps.sampled.pop("a") is None


def test_requests_that_ended_are_kept_while_there_is_room_and_of_the_last_step_all() -> None:
    steps = Steps(2 * (ENTRY_BYTES + 8))
    names = ["0", "1", "2"]
    steps.begin(*names, "3", "4")
    steps.step(1, {name: [int(name)] for name in [*names, "3", "4"]}, [0.0] * 5)
    steps.sampled.end(names)
    assert steps.fetched("1")[0] == [1]
    steps.sampled.end(["3"])
    assert steps.fetched("0")[0] == [0]
    steps.sampled.end(["4"])
    assert [steps.fetched(name)[0] for name in ("2", "3", "4")] == [[2], [3], [4]]


def test_the_first_to_end_are_forgotten_first() -> None:
    steps = Steps(ENTRY_BYTES + 8)
    names = ["0", "1", "2"]
    steps.begin(*names)
    steps.step(1, {name: [int(name)] for name in names}, [0.0] * 3)
    steps.sampled.end(["0", "1"])
    steps.sampled.end(["2"])
    assert steps.sampled.pop("0") is None
    assert [steps.fetched(name)[0] for name in ("1", "2")] == [[1], [2]]


def test_result_without_log_probabilities_is_left_as_it_is() -> None:
    output = SimpleNamespace(logprobs=None)
    assert StepResult.of(StepResult.take(output, 1)) is None
    found = SimpleNamespace(logprobs=np.array([[-0.5, -0.1]], np.float32), cu_num_generated_tokens=None)
    output = StepResult.take(SimpleNamespace(logprobs=found), 3)
    result = StepResult.of(output) or pytest.fail("nothing taken")
    assert (output.logprobs, result.version, result.logprobs.tolist()) == (None, 3, [-0.5])
