"""Tests that every engine must pass; a module provides the fixture `bench` and subclasses `EngineContract`.

No test sleeps. A finished pilot request of a few tokens proves that other requests in the same batches have
about as many tokens. Requests that must outlive an update are aborted at the end of the test.
"""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from protocol.errors import EngineError, Unsupported, WeightError
from rollout.engines.base import Completion, KvPolicy, Occupancy, Request, Sampling, Served
from rollout.engines.contract.bench import FAULTS, LONG, MAX_MODEL_LEN, PROMPTS, Bench, ask, together
from rollout.engines.contract.distribution import MIN_P_VALUE, places, uniformity
from rollout.engines.contract.models import VOCAB, logits_of

ATTEMPTS = 5
"""Attempts to commit before the longest requests end, which can fail on a busy machine."""


class EngineContract:
    """Contract of the interface `Engine`, one test per promise.

    The engine must also provide `live_digest()`: an awaitable number that changes with the live weights.
    """

    async def test_fresh_engine_serves_no_version_and_cannot_adopt_one(self, bench: Bench) -> None:
        assert bench.engine.served == Served("", -1, 0)
        with pytest.raises(WeightError):
            await bench.engine.adopt("e1", 0)
        found = await bench.engine.generate(ask("fresh", PROMPTS[0], 4))
        assert found.spans == ((4, -1),)
        manifest = await bench.serve("A")
        assert bench.engine.served == Served("e1", manifest.version, manifest.digest)

    async def test_greedy_tokens_are_those_of_the_model(self, bench: Bench) -> None:
        version = (await bench.serve("A")).version
        found = await together(bench.engine, [ask(f"greedy{i}", p, 40) for i, p in enumerate(PROMPTS)])
        again = await together(bench.engine, [ask(f"greedy{i}", p, 40) for i, p in enumerate(PROMPTS)])
        assert bench.margin or [c.tokens for c in again] == [c.tokens for c in found]
        for prompt, completion in zip(PROMPTS, found, strict=True):
            assert completion.finish_reason == "length"
            assert completion.spans == ((40, version),)
            assert len(completion.logprobs) == len(completion.tokens) == 40
            assert bench.follows([(40, "A")], prompt, completion.tokens, recompute=True)

    async def test_logprobs_are_those_of_the_sampled_distribution(self, bench: Bench) -> None:
        await bench.serve("A")
        ways: list[dict[str, float]] = [
            {"temperature": 0},
            {},
            {"temperature": 0.7},
            {"temperature": 1.3, "top_k": 5},
            {"top_p": 0.8},
            {"temperature": 0.9, "top_k": 50, "top_p": 0.9},
            {"temperature": 0.8, "top_k": 1},
        ]
        seeds = bench.engine.capabilities.seeds
        kinds = [Sampling(max_tokens=24, seed=i if seeds else None, **way) for i, way in enumerate(ways)]  # type: ignore[arg-type]
        requests = [Request(f"kind{i}/0", PROMPTS[i % 3], kind) for i, kind in enumerate(kinds)]
        for request, found in zip(requests, await together(bench.engine, requests), strict=True):
            if not bench.computes:
                assert torch.tensor(found.logprobs).allclose(-torch.tensor(float(VOCAB)).log())
                continue
            logits = logits_of(bench.models["A"], request.prompt, found.tokens)
            expected = [
                bench.expected_logprob(row, request.sampling, t)
                for row, t in zip(logits, found.tokens, strict=True)
            ]
            bench.assert_logprobs(request.sampling, found.logprobs, expected)

    async def test_tokens_are_drawn_from_the_distribution_of_the_model(self, bench: Bench) -> None:
        if not bench.computes:
            pytest.skip("an engine without a model draws from none")
        await bench.serve("A")
        generator, found = torch.Generator().manual_seed(0), []
        await together(
            bench.engine, [ask(f"before{i}", p, 24) for i, p in enumerate(PROMPTS)]
        )  # to draft from
        for temperature in (1.0, 0.4, 0.2):
            requests = [
                Request(f"draw{i}/0", PROMPTS[i % 3], Sampling(max_tokens=24, temperature=temperature))
                for i in range(48)
            ]
            for request, drawn in zip(requests, await together(bench.engine, requests), strict=True):
                scores = logits_of(bench.models["A"], request.prompt, drawn.tokens) / temperature
                found.append(places(scores.log_softmax(-1), torch.tensor(drawn.tokens), generator))
        assert uniformity(torch.cat(found)) > MIN_P_VALUE
        accepted = (await bench.engine.occupancy()).drafts_accepted
        min_accepted = bench.min_accepted
        assert accepted is None if min_accepted is None else (accepted or 0) > min_accepted

    async def test_seed_repeats_a_completion_or_is_refused(self, bench: Bench) -> None:
        request = ask("seeded", PROMPTS[0], 24, temperature=1.0, seed=7)
        if not bench.engine.capabilities.seeds:
            with pytest.raises(Unsupported, match="seeded/0"):
                await bench.engine.generate(request)
            await bench.pilot("after")
            return
        first, again = await bench.engine.generate(request), await bench.engine.generate(request)
        assert again.tokens == first.tokens

    async def test_stop_token_ends_a_completion_and_is_its_last(self, bench: Bench) -> None:
        await bench.serve("A")
        whole = (await bench.engine.generate(ask("stop", PROMPTS[0], 40))).tokens
        found = await bench.engine.generate(ask("stop", PROMPTS[0], 40, stop_token_ids=(whole[9],)))
        if bench.computes:
            assert bench.margin or found.tokens == whole[: whole.index(whole[9]) + 1]
            assert bench.margin or found.finish_reason == "stop"
        assert (found.tokens[-1] == whole[9]) == (found.finish_reason == "stop")
        assert found.spans[-1][0] == len(found.tokens) == len(found.logprobs)
        limit = whole.index(whole[9]) + 1
        fits = await bench.engine.generate(ask("fits", PROMPTS[0], limit, stop_token_ids=(whole[9],)))
        assert (fits.tokens[-1] == whole[9]) == (fits.finish_reason == "stop")

    @pytest.mark.parametrize(
        ("request_", "words"),
        [
            (ask("empty", (), 4), "empty"),
            (ask("none", (1, 2), 0), "max_tokens"),
            (ask("long", (1,) * (MAX_MODEL_LEN - 24), 25), "max_model_len"),
            (ask("range", (1, VOCAB), 4), f"token id {VOCAB}"),
            (ask("minus", (1, -1), 4), "token id -1"),
            (ask("stopper", (1,), 4, stop_token_ids=(VOCAB,)), "stop token"),
            (ask("cold", (1,), 4, temperature=-1.0), "temperature"),
        ],
    )
    async def test_invalid_request_is_refused_by_name(
        self, bench: Bench, request_: Request, words: str
    ) -> None:
        with pytest.raises(EngineError, match=words) as error:
            await bench.engine.generate(request_)
        assert request_.id in str(error.value)
        await bench.pilot("after")

    async def test_running_id_is_refused(self, bench: Bench) -> None:
        async with bench.long(PROMPTS[0]):
            with pytest.raises(EngineError, match="long0"):
                await bench.engine.generate(Request("long0/0", PROMPTS[1], Sampling(max_tokens=4)))

    async def test_abort_returns_the_tokens_so_far(self, bench: Bench) -> None:
        await bench.serve("A")
        async with bench.long(PROMPTS[0]) as (task,):
            await bench.engine.abort(["nobody", "long0/0"])
            found = await task
        assert found.finish_reason == "abort"
        assert 0 < len(found.tokens) < LONG
        assert found.spans == ((len(found.tokens), bench.engine.served.version),)
        assert len(found.logprobs) == len(found.tokens)
        assert bench.follows([(len(found.tokens), "A")], PROMPTS[0], found.tokens, recompute=True)

    async def test_cancelled_generate_frees_its_id(self, bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(bench.engine.generate(ask("gone", PROMPTS[0], LONG)), name="gone")
            await bench.pilot("first")
            task.cancel()
        assert task.cancelled()
        assert len((await bench.engine.generate(ask("gone", PROMPTS[0], 8))).tokens) == 8

    async def test_pause_stops_and_resume_continues(self, bench: Bench) -> None:
        await bench.serve("A")
        alone = (await bench.engine.generate(ask("held", PROMPTS[0], 120))).tokens
        async with asyncio.TaskGroup() as group:
            held = group.create_task(bench.engine.generate(ask("held", PROMPTS[0], 120)), name="held")
            await bench.engine.pause()
            await bench.engine.pause()
            late = group.create_task(bench.engine.generate(ask("late", PROMPTS[1], 4)), name="late")
            await bench.turns()  # both would end if the engine were not paused
            assert not held.done()
            assert not late.done()
            await bench.engine.resume()
            await bench.engine.resume()
        assert bench.margin or held.result().tokens == alone
        assert len(late.result().tokens) == 4

    async def test_update_while_generating_is_exact_at_the_recorded_token(self, bench: Bench) -> None:
        for _ in range(ATTEMPTS):
            old = (await bench.serve("A")).version
            async with bench.long(*PROMPTS) as tasks:
                manifest = bench.publish("B")
                await bench.engine.stage(manifest)
                assert bench.engine.served.version == old
                pause_ms = await bench.engine.commit(manifest)
                were_running = not any(task.done() for task in tasks)
                assert pause_ms >= 0
                assert bench.engine.served == Served("e1", manifest.version, manifest.digest)
                await bench.pilot("after")
            if were_running:
                break
        assert were_running, "on a machine as busy as this one all requests end before a version is staged"
        found = [task.result() for task in tasks]
        for completion in found:
            assert [version for _, version in completion.spans] == [old, manifest.version]
        if bench.computes:
            assert_switched(bench, found, [["A", "B"]] * len(found))

    async def test_several_updates_leave_one_span_each(self, bench: Bench) -> None:
        versions = [(await bench.serve("A")).version]
        async with bench.long(*PROMPTS) as tasks:
            for name in ("B", "A", "B"):
                versions.append((await bench.serve(name)).version)
                await bench.pilot("between")
        found = [task.result() for task in tasks]
        assert [[v for _, v in c.spans] for c in found] == [versions] * len(found)
        if bench.computes:
            assert_switched(bench, found, [["A", "B", "A", "B"]] * len(found))

    async def test_commits_one_after_the_other_are_exact_at_their_tokens(self, bench: Bench) -> None:
        names = {(await bench.serve("A")).version: "A"}
        async with bench.long(*PROMPTS) as tasks:
            for name in ("B", "A") * 10:
                names[(await bench.serve(name)).version] = name
            await bench.pilot("after")
        found = [task.result() for task in tasks]
        for prompt, completion in zip(PROMPTS, found, strict=True):
            versions = [version for _, version in completion.spans]
            assert versions[0] == min(names)
            assert versions[-1] == max(names)
            assert versions == sorted(set(versions))
            rows = [(end, names[version]) for end, version in completion.spans]
            bench.assert_switched_logprobs(rows, prompt, completion)
        if bench.computes:
            assert_switched(bench, found, [[names[v] for _, v in c.spans] for c in found])

    async def test_commit_while_paused_stays_paused(self, bench: Bench) -> None:
        old = (await bench.serve("A")).version
        async with bench.long(*PROMPTS) as tasks:
            await bench.engine.pause()
            new = (await bench.serve("B")).version
            await bench.engine.live_digest()
            assert not any(task.done() for task in tasks)
            await bench.engine.resume()
            await bench.pilot("after")
        found = [task.result() for task in tasks]
        assert [[v for _, v in c.spans] for c in found] == [[old, new]] * len(found)
        if bench.computes:
            assert_switched(bench, found, [["A", "B"]] * len(found))

    async def test_new_request_never_uses_an_old_prefix(self, bench: Bench) -> None:
        prompt = tuple(range(4, 432))
        await bench.serve("A")
        warm = await bench.engine.generate(ask("warm", prompt, 4))
        longer = (*prompt, *warm.tokens, *prompt[:20])
        again = await bench.engine.generate(ask("again", longer, 4))
        assert warm.cached_tokens == 0
        assert again.cached_tokens in (range(256, len(longer)) if bench.caches else (0,))
        version = (await bench.serve("B")).version
        found = await bench.engine.generate(ask("cold", prompt, 16))
        assert found.spans == ((16, version),)
        assert found.cached_tokens == 0
        assert bench.follows([(16, "B")], prompt, found.tokens, recompute=True)

    async def test_request_that_waits_at_a_commit_never_uses_an_old_prefix(self, bench: Bench) -> None:
        prompt = tuple(range(4, 432))
        await bench.serve("A")
        await bench.engine.generate(ask("warm", prompt, 4))
        async with asyncio.TaskGroup() as group:
            await bench.engine.pause()
            waiting = group.create_task(bench.engine.generate(ask("waiting", prompt, 16)), name="waiting")
            await bench.turns()
            version = (await bench.serve("B")).version
            await bench.engine.resume()
        found = waiting.result()
        assert (found.spans, found.cached_tokens) == (((16, version),), 0)
        assert bench.follows([(16, "B")], prompt, found.tokens, recompute=True)

    async def test_commit_of_what_is_not_staged_is_refused(self, bench: Bench) -> None:
        await bench.serve("A")
        served, live = bench.engine.served, await bench.engine.live_digest()
        never = bench.publish("B")
        with pytest.raises(WeightError, match=r"not staged|idle"):
            await bench.engine.commit(never)
        staged = bench.publish("B")
        await bench.engine.stage(staged)
        with pytest.raises(WeightError, match="not staged"):
            await bench.engine.commit(never)
        assert (bench.engine.served, await bench.engine.live_digest()) == (served, live)

    async def test_version_is_committed_once(self, bench: Bench) -> None:
        manifest = await bench.serve("A")
        with pytest.raises(WeightError):
            await bench.engine.commit(manifest)
        assert bench.engine.served.version == manifest.version

    async def test_cancelled_stage_leaves_nothing_staged(self, bench: Bench) -> None:
        await bench.serve("A")
        manifest = bench.publish("B")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(bench.engine.stage(manifest), name="stage")
            await asyncio.sleep(0)
            task.cancel()
        assert task.cancelled()
        with pytest.raises(WeightError):
            await bench.engine.commit(manifest)
        await bench.serve("B")

    async def test_concurrent_stage_is_refused(self, bench: Bench) -> None:
        await bench.serve("A")
        first, second = bench.publish("B"), bench.publish("B")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(bench.engine.stage(first), name="stage")
            await asyncio.sleep(0)
            with pytest.raises(WeightError, match="being staged"):
                await bench.engine.stage(second)
        assert task.done()
        await bench.engine.commit(first)

    async def test_occupancy_counts_running_requests(self, bench: Bench) -> None:
        await bench.serve("A")
        async with bench.long(*PROMPTS):
            busy = await bench.engine.occupancy()
        assert busy.running is None or busy.running >= len(PROMPTS)
        assert busy.kv_use is None or 0 < busy.kv_use <= 1
        async with asyncio.timeout(30):
            while (idle := await bench.engine.occupancy()).running:  # ended requests leave at the next step
                await bench.pilot("after")
        at_rest = Occupancy(busy.running and 0, busy.kv_use and 0.0, idle.drafts_accepted)
        assert idle == at_rest

    async def test_adopt_renames_the_live_version(self, bench: Bench) -> None:
        manifest = await bench.serve("A")
        live = await bench.engine.live_digest()
        async with bench.long(*PROMPTS) as tasks:
            await bench.engine.adopt("e2", 77)
            assert bench.engine.served == Served("e2", 77, manifest.digest)
            await bench.pilot("after")
        for task in tasks:
            assert [v for _, v in task.result().spans] == [manifest.version, 77], task.result().spans
        if bench.computes:
            assert_switched(bench, [task.result() for task in tasks], [["A", "A"]] * len(tasks), strict=False)
        assert await bench.engine.live_digest() == live

    @pytest.mark.parametrize(
        "fault", ["corrupted", "truncated", "file missing", "twice", "overlap", "digest"]
    )
    async def test_broken_version_changes_nothing(self, bench: Bench, fault: str) -> None:
        await assert_refused(bench, fault)

    @pytest.mark.parametrize("fault", ["tensor missing", "shape", "dtype", "unknown", "architecture"])
    async def test_version_of_another_model_changes_nothing(self, bench: Bench, fault: str) -> None:
        if not bench.computes:
            pytest.skip("an engine without a model takes every model's weights")
        await assert_refused(bench, fault)


def assert_switched(
    bench: Bench,
    found: Sequence[Completion],
    names: Sequence[Sequence[str]],
    *,
    strict: bool = True,
    recompute: bool = False,
) -> None:
    """Check that tokens equal plain transformers', switched between models at the recorded tokens.

    Args:
        found: completions of `PROMPTS`.
        names: model names of each completion's spans.
        strict: whether a switch one token earlier or later must give other tokens.
        recompute: whether the KV cache was lost, under any policy.
    """
    recompute = recompute or bench.kv is KvPolicy.RECOMPUTE
    moved = {-1: False, 1: False}
    for prompt, completion, chain in zip(PROMPTS, found, names, strict=True):
        rows = [(end, name) for (end, _), name in zip(completion.spans, chain, strict=True)]
        assert bench.follows(rows, prompt, completion.tokens, recompute=recompute)
        for shift in moved:
            shifted = [(rows[0][0] + shift, rows[0][1]), *rows[1:]]
            moved[shift] |= not bench.follows(shifted, prompt, completion.tokens, recompute=recompute)
    assert not strict or all(moved.values())


async def assert_refused(bench: Bench, fault: str) -> None:
    """Check that staging a faulty version fails without effect, and that the next version is applied.

    Running requests continue.
    """
    served = (await bench.serve("A")).version
    live = await bench.engine.live_digest()
    manifest = FAULTS[fault](bench)
    async with bench.long(PROMPTS[0]) as (task,):
        with pytest.raises(WeightError) as error:
            await bench.engine.stage(manifest)
        assert "tensor" in str(error.value) or "digest" in str(error.value) or "Qwen3" in str(error.value)
        with pytest.raises(WeightError):
            await bench.engine.commit(manifest)
        assert await bench.engine.live_digest() == live
        assert bench.engine.served.version == served
        await bench.pilot("after")
    found = task.result()
    assert found.spans == ((len(found.tokens), served),)
    if bench.computes:
        assert bench.follows([(len(found.tokens), "A")], PROMPTS[0], found.tokens, recompute=True)
    manifest = await bench.serve("B")
    assert bench.engine.served.digest == manifest.digest
