"""Measures the cost of the audit of a run, and whether it alarms, on the demo's job.

    python -m tests.benchmarks.audit --out runs/audit.json [--engine vllm] [--dtype bfloat16] [--share 0.01]
        [--pairs 2]

All services are in one process, the engine in others. Its cost is the processor time of its thread, against
all of the run; what its budget counts has waits for verifiers and digests in it, too. With `--pairs` runs
without it and with it alternate, and the processor time of each trained token is compared.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.audit.live import FILE, LiveAudit
from services.audit.recompute import Recomputer
from tests.benchmarks.record import record_now
from tests.contracts.sglang_environment import STAND_INS, sglang_python
from tests.integration.loop import run_to_end, settings_for

JOB = ("monitor.enabled=false", "eval.at_end=false", "trainer.checkpoint_every=1000")


def main() -> None:
    """Make the run; write its alarms, and the processor time of run and audit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--pairs", type=int, default=0, help="runs without an audit, and as many with it")
    parser.add_argument("--set", action="append", default=[], help="of the run: section.key=value")
    given = parser.parse_args()
    if given.engine == "sglang":
        python, environment = sglang_python(), f'{{ PYTHONPATH = "{STAND_INS}" }}'
        given.set += [f'engine.python="{python}"', f"engine.environment={environment}"]
    settings = (*JOB, f"engine.name={given.engine}", f"engine.dtype={given.dtype}", *given.set)
    shares = [0.0, given.share] * given.pairs or [given.share]
    runs = [measured(f"audit.share={share}", *settings) for share in shares]
    facts = {"record": record_now(), **vars(given), **runs[-1], "runs": runs} | ratio_of(runs)
    given.out.write_text(json.dumps({**facts, "out": given.out.name}, indent=1) + "\n")
    print(json.dumps({name: value for name, value in facts.items() if name != "record"}, default=str))


def ratio_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the processor time of a trained token with an audit over that without; nothing without pairs."""
    if len(runs) < 2:
        return {}
    without, audited = (sum(run["run_s"] for run in some) / sum(run["tokens"] for run in some)
                        for some in (runs[::2], runs[1::2]))  # fmt: skip
    return {"audited_over_without": round(audited / without, 4)}


def measured(*overrides: str) -> dict[str, Any]:
    """Make a run; returns its steps, tokens, alarms, and seconds of processor time."""
    audits: list[LiveAudit] = []
    tokens, score, begin = [0], Recomputer.score, LiveAudit.__init__

    def begun(audit: LiveAudit, *given: Any) -> None:
        begin(audit, *given)
        audits.append(audit)

    def scored(model: Recomputer, prompt: Any, row: Any, temperature: float, **given: Any) -> Any:
        tokens[0] += len(prompt) + len(row.context) + len(row.tokens)
        return score(model, prompt, row, temperature, **given)

    LiveAudit.__init__, Recomputer.score = begun, scored  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as directory:
        started, began = time.monotonic(), processor_s()
        run = asyncio.run(run_to_end(settings_for(Path(directory), "demo.toml", *overrides), seconds=1000))
        total, elapsed = processor_s() - began, time.monotonic() - started
        alarms = Path(directory) / FILE
        LiveAudit.__init__, Recomputer.score = begin, score  # type: ignore[method-assign]
        spent, thread = (
            sum(getattr(audit.budget, name) for audit in audits) for name in ("spent_s", "thread_s")
        )
        said = [json.loads(line)["sentence"] for line in alarms.open()] if alarms.is_file() else []
    return {
        "steps": len(run.steps),
        "tokens": sum(step["trained_tokens"] for step in run.steps),
        "alarms": said,
        "recomputed_tokens": tokens[0],
        "elapsed_s": round(elapsed, 1),
        "run_s": round(total, 2),
        "budgeted_s": round(spent, 3),
        "audit_s": round(thread, 3),
        "audit_share": round(thread / total, 4),
    }


def processor_s() -> float:
    """Return the processor time of this process and of the children that have ended, seconds."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    main()
