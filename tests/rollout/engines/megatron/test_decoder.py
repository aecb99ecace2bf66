"""Tests which requests the decoder of the engine `megatron` serves when its pages are few."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rollout.engines.base import Request, Sampling
from rollout.engines.in_process.running_request import RunningRequest
from rollout.engines.megatron.decoder import PagedDecoder
from tests.trainer.megatron.models import save_model
from trainer.megatron.inference.model import CachedModel

LENGTH, PAGES = 64, 6
"""Tokens of the longest request; pages of 16 tokens, in which one and a half of these fit."""


@pytest.fixture(name="decoder")
def decoder_with_few_pages(tmp_path: Path) -> Iterator[PagedDecoder]:
    page_bytes = 16 * 2 * 2 * 2 * 32 * 4
    model = CachedModel(
        save_model("qwen2", tmp_path),
        dtype="float32",
        running=8,
        length=LENGTH,
        buffer_bytes=PAGES * page_bytes,
    )
    with closing(model):
        yield PagedDecoder(model, 512)


def row(number: int, prompt: int, tokens: int) -> RunningRequest:
    request = Request(f"r{number}", tuple(range(1, prompt + 1)), Sampling(max_tokens=tokens, temperature=0.0))
    return RunningRequest(request, torch.Generator())


def run(decoder: PagedDecoder, rows: list[RunningRequest]) -> list[list[int]]:
    """Decode until all have ended; returns for each step the numbers of the rows that got a token."""
    left, served = list(rows), []
    while left:
        before = [len(each.tokens) for each in left]
        decoder.step(left, version=len(served))
        served.append(
            [rows.index(each) for each, n in zip(left, before, strict=True) if len(each.tokens) > n]
        )
        ended = [each for each in left if each.finish_reason]
        decoder.forget(ended)
        left = [each for each in left if not each.finish_reason]
    return served


def test_first_request_gets_a_token_in_every_step_and_every_request_ends(decoder: PagedDecoder) -> None:
    rows = [row(i, 4, 60) for i in range(5)]
    served = run(decoder, rows)
    assert [len(each.tokens) for each in rows] == [60] * 5
    for step, numbers in enumerate(served):
        waiting = [i for i, each in enumerate(rows) if each.versions[-1] >= step]
        assert numbers == waiting[: len(numbers)]
        assert numbers
    assert (decoder.running, decoder.use) == (0, 0.0)


def test_request_whose_pages_were_taken_continues_with_the_same_tokens(decoder: PagedDecoder) -> None:
    rows = [row(i, 4 + i, 56) for i in range(4)]
    served = run(decoder, rows)
    steps = [[step for step, numbers in enumerate(served) if i in numbers] for i in range(4)]
    assert any(last - first + 1 > 56 for first, *_, last in steps), "none was interrupted"
    assert [each.versions for each in rows] == steps
    for each in rows:
        alone = row(9, len(each.request.prompt), 56)
        run(decoder, [alone])
        assert alone.tokens == each.tokens
        torch.testing.assert_close(alone.logprobs, each.logprobs, atol=1e-5, rtol=0)


def test_request_waits_for_those_before_it_even_if_it_would_fit(decoder: PagedDecoder) -> None:
    first, long, short = row(0, 40, 20), row(1, 50, 4), row(2, 2, 2)
    served = run(decoder, [first, long, short])
    started = [next(step for step, numbers in enumerate(served) if i in numbers) for i in range(3)]
    assert started[0] == 0 < started[1] <= started[2]


def test_cache_as_large_as_all_requests_serves_all_of_them_in_every_step(tmp_path: Path) -> None:
    model = CachedModel(save_model("qwen2", tmp_path), dtype="float32", running=3, length=LENGTH)
    with closing(model):
        served = run(PagedDecoder(model, 512), [row(i, 30, 34) for i in range(3)])
    assert served == [[0, 1, 2]] * 34
