"""The bound under stragglers, as a table: `python -m tests.benchmarks.bound`. Every E and policy on the real
loop, scripted engine."""

import asyncio
import tempfile
from pathlib import Path

from tests.integration.loop import Finished, run_to_end, settings_for
from tests.integration.test_bound import STRAGGLERS

STEPS = 24
HEAD = (
    "| stragglers | E | policy | largest trained lag | mean lag | masked tokens | dropped groups | wait_s "
    "| steps/s | violations |"
)


def row(stragglers: str, bound: int, policy: str, run: Finished) -> str:
    """One line of the table."""
    steps = run.steps
    duration = steps[-1]["time"] - steps[0]["time"]
    cells = (
        "5 % x 20" if stragglers == "few" else "40 % x 10",
        bound,
        policy,
        run.audit.max_lag,
        f"{sum(s['lag_mean'] for s in steps) / len(steps):.2f}",
        sum(s["masked_tokens"] for s in steps),
        run.status.dropped,
        f"{sum(s['wait_s'] for s in steps):.1f}",
        f"{(len(steps) - 1) / duration:.1f}",
        len(run.audit.violations),
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


async def main() -> None:
    """Print the table, a row as soon as it is measured."""
    print(HEAD, "|" + "---|" * (HEAD.count("|") - 1), sep="\n", flush=True)
    for stragglers, overrides in STRAGGLERS.items():
        for bound in (0, 1, 2, 4):
            for policy in ("wait", "mask", "drop"):
                with tempfile.TemporaryDirectory(prefix="tether-bound-") as directory:
                    settings = settings_for(
                        Path(directory), "stragglers.toml", f"bound.max_staleness={bound}",
                        f"bound.staleness_policy={policy}", *overrides, f"run.steps={STEPS}",
                        "rollout.groups_in_flight=64", "trainer.step_s=0.02",
                    )  # fmt: skip
                    print(row(stragglers, bound, policy, await run_to_end(settings)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
