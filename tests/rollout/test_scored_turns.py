"""Tests that an environment's turns are in the message with their text, and reach scores and advantages."""

from pathlib import Path

import pytest

from protocol.messages import Rollout, ScoredRollout
from protocol.turns import turns_of
from reward.config import RewardConfig, VerifierConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from tests.rollout.tokenizers import write_tokenizer
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.data.step_plan import plan_step

SCORE = """
def score(*, turns, contexts, metadata):
    assert contexts == ["", "12", "3"]
    return [float(text.count(metadata["answer"])) - place for place, text in enumerate(turns)]
"""


async def play(episode: Episode) -> float | None:
    for said in ("1", "2", "3"):
        await episode.generate(4)
        if said != "3":
            episode.insert("12" if said == "1" else "3")
    return None


async def generated(directory: Path, *, texts: bool) -> Rollout:
    write_tokenizer(directory / "model")
    engine = ScriptedEngine(EngineConfig(name="scripted"), directory / "model", "engine.1")
    await engine.start()
    try:
        return await generate_group(
            engine, Renderer(directory / "model", RenderConfig()), EpisodeEnvironment(play),
            Prompt("3+4=", metadata={"answer": "7"}), group=1, token="t", n=3,
            sampling=Sampling(max_tokens=4, stop_token_ids=(1,)), engine_name="e", with_turn_texts=texts,
        )  # fmt: skip
    finally:
        await engine.close()


@pytest.mark.xdist_group("sandbox")
async def test_scores_of_an_environments_turns_become_advantages_of_their_tokens(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, texts=True)
    turns = turns_of(rollout)
    assert turns is not None
    assert [len(of_sample) for of_sample in turns] == [3, 3, 3]
    (tmp_path / "own_steps.py").write_text(SCORE)
    config = RewardConfig(verifiers=(VerifierConfig("function", options={"path": "own_steps:score"}),))
    async with ScorePool(config, [str(tmp_path)]) as pool:
        scored = await score_rollout(rollout, pool, "reward.1")
    assert isinstance(scored, ScoredRollout), scored
    assert scored.turn_rewards is not None
    assert scored.turn_rewards.numpy().sum() == pytest.approx(scored.rewards.numpy().sum())
    wanted = [text.count("7") - place for text, place in zip(rollout.turn_texts, [0, 1, 2] * 3, strict=True)]
    assert scored.turn_rewards.numpy().tolist() == wanted
    made = plan_step([(scored, 1)], step=0, algorithm=make_algorithm(AlgorithmConfig(name="dr_grpo")))
    assert made.turns is not None
    returns = [[sum(wanted[i + k : i + 3]) for k in range(3)] for i in (0, 3, 6)]
    assert [values.tolist() for values in made.turns.returns] == returns


async def test_texts_are_sent_where_a_verifier_may_ask_for_them(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, texts=False)
    assert (rollout.turn_texts, rollout.turn_contexts) == ((), ())
    assert rollout.turns is not None
    assert RewardConfig(verifiers=(VerifierConfig("function"),)).may_score_turns
    assert not RewardConfig(verifiers=(VerifierConfig("math"),)).may_score_turns
