"""The benchmark without a GPU: a tiny model, both engines alone and as the project runs them. No timing is
asserted."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.generation.load import rate_of, requests_of
from tests.benchmarks.generation.session import COMMITTING, LOGPROBS, WAYS
from tests.benchmarks.generation.table import BARE, ratios_of, render
from tests.benchmarks.versions import ROOT


def facts(ours: float) -> dict[str, object]:
    def rate(kind: str, tokens_per_s: float, **more: object) -> dict[str, object]:
        return {"kind": kind, "running": 32, "tokens_per_s": tokens_per_s, **more}

    return {
        "model": "tiny",
        "machine": {},
        "versions": {},
        "failed": {"sglang": "gone after 0 loads"},
        "ways": {
            "vllm-bare": [rate("", 1000.0), rate(LOGPROBS, 750.0), rate("", 500.0), rate("", 2000.0)],
            "vllm": [
                rate("", ours),
                rate(COMMITTING, 940.0, paused_ms=[1.0, 3.0]),
                rate("", 2 * ours),
                rate(COMMITTING, 470.0, paused_ms=[20.0]),
                rate("", ours),
            ],
            "sglang": [],
        },
    }


def test_ratio_is_the_median_over_the_bare_engine_in_the_same_round() -> None:
    plain, committing = ratios_of(facts(970.0))
    assert plain["ratios"] == [0.97, 3.88, 0.485]
    assert (plain["ratio"], plain["reached"], plain["commits"]) == (0.97, True, 0)
    assert (plain["tokens_per_s"], plain["bare"]) == (970.0, 1000.0)
    assert (committing["ratio"], committing["reached"], committing["paused_ms"]) == (0.94, False, 3.0)


def test_table_names_the_loads_the_cost_of_log_probabilities_and_what_failed() -> None:
    table = render(facts(970.0))
    assert "| vllm, commits | 32 | 705 | 1,000 | 0.940 | 0.95 | 3 | 3.0 |" in table
    assert "vllm-bare with its own log-probabilities, 32 at a time: 750 tokens/s" in table
    assert "failed: sglang: gone after 0 loads" in table


def test_engine_megatron_is_compared_with_the_bare_vllm_and_has_no_aim() -> None:
    found = facts(970.0)
    found["ways"] |= {  # type: ignore[operator]
        way: [{"kind": "", "running": 32, "tokens_per_s": rate}]
        for way, rate in (("megatron", 400.0), ("megatron-graphs", 800.0))
    }
    eager, graphs = ratios_of(found)[-2:]
    assert (eager["engine"], eager["ratio"], eager["aim"], eager["reached"]) == ("megatron", 0.4, None, None)
    assert (graphs["engine"], graphs["ratio"], graphs["aim"]) == ("megatron-graphs", 0.8, None)


async def test_load_keeps_so_many_running_and_every_engine_gets_the_same() -> None:
    most = running = 0

    async def generate(request: object) -> int:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return request.sampling.max_tokens  # type: ignore[attr-defined, no-any-return]

    requests = requests_of(32, 100)
    assert requests == requests_of(32, 100)
    rate = await rate_of(generate, requests, 32)
    assert (most, rate.tokens) == (32, sum(request.sampling.max_tokens for request in requests))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_tiny_run_measures_every_engine_alone_and_as_the_project_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.generation.run",
        "--tiny",
        "--minutes=24",
        "--engines=vllm,sglang,megatron,megatron-graphs",
        f"--out={out}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1480, check=False)
    found = json.loads(out.read_text())
    assert found["failed"] == {}, done.stderr[-4000:]
    assert done.returncode == 0
    assert set(found["ways"]) == set(WAYS)
    loads = {(row["engine"], row["kind"], row["running"]) for row in found["ratios"]}
    kinds = ("", COMMITTING)
    assert loads == {(engine, kind, n) for engine in BARE for kind in kinds for n in (4, 8)}
    assert all(row["commits"] for row in found["ratios"] if row["kind"])
