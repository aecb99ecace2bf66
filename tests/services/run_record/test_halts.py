"""Tests that every cause of a halt names where to look and what to do."""

import pytest

from services.run_record.halts import _CAUSES, explain_drops, explain_halt


@pytest.mark.parametrize("reason", [*_CAUSES, "novelty"])
def test_halt_names_cause_place_and_remedy(reason: str) -> None:
    line = explain_halt(reason)
    assert line.startswith(f"the run halted for the reason {reason!r}: ")
    assert "; see " in line
    assert line.endswith("then start the same command again, which continues from the last step")
    assert "\n" not in line


def test_halt_for_attempts_names_what_led_to_most_of_them() -> None:
    line = explain_halt("attempts", {"prompt": 1, "reward:function: /x/own.py:2: KeyError: 3": 9})
    assert "could not be computed (verifier function: /x/own.py:2: KeyError: 3), in all attempts" in line
    assert "logs/reward.*.log" in line
    assert "prompts are longer than render.max_prompt_tokens" in explain_halt("attempts", {"prompt": 3})
    assert "used up their" in explain_halt("attempts", {})


def test_halt_for_episodes_names_the_error_of_most_of_them() -> None:
    details = {"episode: error: /x/own.py:2: KeyError: 3": 9, "episode: call_s": 1, "prompt: too long": 20}
    line = explain_halt("episode", details)
    assert "failed in the environment (error: /x/own.py:2: KeyError: 3), more than" in line
    assert "in all attempts" not in line


def test_halt_for_a_cause_that_the_trainer_named_says_it() -> None:
    line = explain_halt("step 3: engine and trainer disagree")
    assert line.startswith("the run halted: step 3: engine and trainer disagree; fix the cause, ")


def test_drops_that_no_setting_asks_for_are_explained() -> None:
    (prompts,) = explain_drops({"prompt": 18, "stale": 3, "no_signal": 5, "attempts": 0})
    assert prompts.startswith("groups left out for the reason 'prompt': 18; prompts are longer than render.")
    assert "logs/rollout.*.log" in prompts
    (own,) = explain_drops({"mine": 1})
    assert own == "groups left out for the reason 'mine': 1; they failed; see the logs; fix the cause"
