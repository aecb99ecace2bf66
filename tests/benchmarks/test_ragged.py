"""The benchmark of building a batch runs on a small step. No timing is asserted."""

from tests.benchmarks.ragged import LONGEST, PROMPT, run


def test_a_small_step_is_planned_and_built() -> None:
    facts = run(samples=40, tokens=100_000, replicas=3)
    assert abs(facts["tokens"] - 100_000) < LONGEST
    assert facts["longest"] == LONGEST
    assert facts["samples"] * PROMPT < facts["tokens"]
    assert {"plan_s", "all_parts_s", "whole_s", "peak_one_rank_gb"} <= facts.keys()
