"""Measures the cost of the audit of a run, and whether it alarms, on the demo's job.

    python -m tests.benchmarks.audit --out runs/audit.json [--engine vllm] [--dtype bfloat16] [--share 0.01]

All services are in one process. Its cost is processor time: of the audit's thread, against all of the run.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from services.audit.live import FILE, LiveAudit
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
    parser.add_argument("--set", action="append", default=[], help="of the run: section.key=value")
    given = parser.parse_args()
    if given.engine == "sglang":
        python, environment = sglang_python(), f'{{ PYTHONPATH = "{STAND_INS}" }}'
        given.set += [f'engine.python="{python}"', f"engine.environment={environment}"]
    settings = (f"engine.name={given.engine}", f"engine.dtype={given.dtype}", f"audit.share={given.share}")
    facts = {"record": record_now(), **vars(given), **measured(*JOB, *settings, *given.set)}
    given.out.write_text(json.dumps({**facts, "out": given.out.name}, indent=1) + "\n")
    print(json.dumps({name: value for name, value in facts.items() if name != "record"}, default=str))


def measured(*overrides: str) -> dict[str, Any]:
    """Make a run; returns its steps, tokens, alarms, and seconds of processor time."""
    spent, carry_out = [0.0], LiveAudit._carry_out

    def timed(audit: LiveAudit, work: Any) -> Any:
        began = time.thread_time()
        try:
            return carry_out(audit, work)
        finally:
            spent[0] += time.thread_time() - began

    LiveAudit._carry_out = timed  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as directory:
        began = processor_s()
        run = asyncio.run(run_to_end(settings_for(Path(directory), "demo.toml", *overrides), seconds=1000))
        total = processor_s() - began
        alarms = Path(directory) / FILE
        said = [json.loads(line)["sentence"] for line in alarms.open()] if alarms.is_file() else []
    return {
        "steps": len(run.steps),
        "tokens": sum(step["trained_tokens"] for step in run.steps),
        "alarms": said,
        "run_s": round(total, 2),
        "audit_s": round(spent[0], 2),
        "audit_share": round(spent[0] / total, 4),
    }


def processor_s() -> float:
    """Return the processor time of this process and of the children that have ended, seconds."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


if __name__ == "__main__":
    main()
