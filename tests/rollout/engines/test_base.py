"""A completion that is cut where it stopped."""

import numpy as np
import pytest

from rollout.engines.base import Completion

EXPERTS = np.arange(2 + 4 - 1, dtype=np.uint16).reshape(-1, 1, 1)
"""Experts of two prompt tokens and four sampled ones; the last sampled token is no input."""
WHOLE = Completion((5, 6, 7, 8), (-1.0, -2.0, -3.0, -4.0), ((2, 0), (4, 1)), "length", EXPERTS, 2)


@pytest.mark.parametrize(
    ("count", "spans"),
    [(1, ((1, 0),)), (2, ((2, 0),)), (3, ((2, 0), (3, 1))), (4, WHOLE.spans)],
)
def test_a_completion_that_stopped_has_all_of_its_first_tokens_alone(
    count: int, spans: tuple[tuple[int, int], ...]
) -> None:
    cut = WHOLE.stopped_at(count)
    assert (cut.tokens, cut.logprobs) == (WHOLE.tokens[:count], WHOLE.logprobs[:count])
    assert cut.spans == spans
    assert cut.experts is not None
    assert cut.experts.ravel().tolist() == list(range(2 + count - 1))
    assert cut.finish_reason == "stop"
    assert WHOLE.stopped_at(None) is WHOLE
