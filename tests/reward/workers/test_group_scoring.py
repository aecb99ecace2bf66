"""Fallbacks, remarks and counts: what becomes of a score that a verifier cannot give."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import SettingsError
from protocol.messages import Remark, ScoredRollout, ScoreFailure
from reward.combine import VerifierError
from reward.config import RewardConfig, VerifierConfig
from reward.score import MAX_REMARKS, bounded, score_rollout
from reward.workers.pool import ScorePool
from tests.reward.judge_server import asked, judge_server
from tests.reward.workers.test_pool import rollout

pytestmark = pytest.mark.xdist_group("sandbox")

OWN = """
def picky(response):
    return {"a": 0.5, "nan": float("nan")}[response]

def meets(response, metadata):
    if response == "write":
        open(metadata["pipe"], "w").write("here")
        return 1
    return len(open(metadata["pipe"]).read())
"""


def own(name: str, **more: Any) -> VerifierConfig:
    return VerifierConfig("function", options={"path": f"own_reward:{name}"}, label=name, **more)


def judging(url: str, **options: Any) -> dict[str, Any]:
    return {"url": url, "model": "m", "prompt": "{response}", "retries": 0, **options}


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    (tmp_path / "own_reward.py").write_text(OWN)
    return [str(tmp_path)]


async def test_samples_of_one_group_are_scored_by_several_workers(modules: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # each end waits for the other
    async with ScorePool(RewardConfig(verifiers=(own("meets"),), workers=2), modules) as pool:
        assert (await pool.score("q", ["read", "write"], {"pipe": str(tmp_path / "pipe")})).rewards == [
            4.0,
            1.0,
        ]


async def test_a_fallback_scores_the_samples_on_which_a_verifier_fails(modules: list[str]) -> None:
    verifiers = (
        own("picky", weight=2.0, fallback="exact_match"),
        VerifierConfig(weight=100.0),
        VerifierConfig("positions", weight=10.0),
    )
    async with ScorePool(RewardConfig(verifiers=verifiers, workers=1), modules) as pool:
        scores = await pool.score("q", ["a", "b", "nan"], {"answer": "b"})
        assert scores.components == {
            "picky": [0.5, 1.0, 0.0], "positions": [0.0, 1.0, 0.0], "fell_back": [0.0, 1.0, 1.0],
        }  # fmt: skip
        assert scores.rewards == [1.0, 12.0, 0.0]
        assert pool.counts["picky", "fallbacks"] == 2
        with pytest.raises(VerifierError, match="has no field 'answer'") as caught:
            await pool.score("q", ["b"], {"other": 1})
        assert caught.value.verifier in ("exact_match", "positions")


@pytest.mark.parametrize(
    ("fallbacks", "says"),
    [
        ({"exact_match": "positions"}, "exact_match: there is no verifier 'positions' to fall back to"),
        ({"exact_match": "exact_match"}, "its fallbacks lead back to 'exact_match'"),
        ({"exact_match": "math", "math": "exact_match"}, "its fallbacks lead back to 'exact_match'"),
    ],
)
def test_fallbacks_that_lead_nowhere_are_refused(fallbacks: dict[str, str], says: str) -> None:
    verifiers = tuple(VerifierConfig(name, fallback=other) for name, other in fallbacks.items())
    with pytest.raises(SettingsError, match=says):
        ScorePool(RewardConfig(verifiers=verifiers))


async def test_remark_of_a_judge_is_kept_with_its_sample(tmp_path: Path) -> None:
    texts = {"7": "Right. 1", "8": "Wrong. 0"}
    async with judge_server(lambda request: texts[asked(request)]) as server:
        options = judging(server.url, cache=str(tmp_path / "cache"), output_price=1e6)
        config = RewardConfig(verifiers=(VerifierConfig("judge", options=options),), workers=1)
        async with ScorePool(config) as pool:
            first = await score_rollout(rollout("7", "8"), pool, "reward.1")
            second = await score_rollout(rollout("7"), pool, "reward.1")
            counts = {what: amount for (_, what), amount in pool.counts.items() if "seconds" not in what}
    assert isinstance(first, ScoredRollout)
    assert isinstance(second, ScoredRollout)
    assert first.rewards.numpy().tolist() == [1.0, 0.0]
    said = {"verifier": "judge", "prompt_tokens": 100, "completion_tokens": 10, "cost": 10.0}
    assert first.remarks == (
        Remark(sample=0, text="Right. 1", **said),
        Remark(sample=1, text="Wrong. 0", **said),
    )
    assert second.remarks == (Remark(verifier="judge", sample=0, text="Right. 1", is_cached=True),)
    assert {what: amount for what, amount in counts.items() if amount} == {
        "calls": 3, "requests": 2, "prompt_tokens": 200, "completion_tokens": 20, "cost": 20, "cache_hits": 1,
    }  # fmt: skip


async def test_a_judge_that_fails_is_a_failure_with_its_url_or_falls_back() -> None:
    async with judge_server(lambda _: web.Response(status=500, text="on fire")) as server:
        judge = VerifierConfig("judge", options=judging(server.url), label="quality")
        async with ScorePool(RewardConfig(verifiers=(judge,), workers=1)) as pool:
            failure = await score_rollout(rollout("7"), pool, "reward.1")
        assert isinstance(failure, ScoreFailure)
        assert failure.verifier == "quality"
        assert f"{server.url}/chat/completions: status 500: on fire" in failure.error
        verifiers = (replace(judge, fallback="exact_match"), VerifierConfig())
        async with ScorePool(RewardConfig(verifiers=verifiers, workers=1)) as pool:
            scored = await score_rollout(rollout("7", "8"), pool, "reward.1")
    assert isinstance(scored, ScoredRollout)
    assert scored.rewards.numpy().tolist() == [1.0, 0.0]
    assert set(scored.components) == {"quality", "fell_back"}
    assert scored.remarks == ()


async def test_a_judge_is_asked_as_many_questions_at_once_as_allowed() -> None:
    async with judge_server(lambda _: "1") as server:
        options = judging(server.url, max_requests=3)
        config = RewardConfig(verifiers=(VerifierConfig("judge", options=options),), workers=1)
        async with ScorePool(config) as pool:
            rewards = (await pool.score("q", [str(i) for i in range(20)], {})).rewards
    assert rewards == [1.0] * 20
    assert server.most_running <= 3


def test_remarks_are_cut_so_that_a_group_stays_small() -> None:
    remarks = [Remark(verifier="judge", sample=i, text="x" * 5000) for i in reversed(range(1000))]
    kept = bounded(remarks)
    assert [remark.sample for remark in kept] == list(range(1000))
    assert sum(len(remark.text) for remark in kept) <= MAX_REMARKS
    assert len(bounded(remarks[:1])[0].text) == 2000
