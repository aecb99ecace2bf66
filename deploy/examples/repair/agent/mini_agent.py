"""Repairs a file with an unmodified mini-swe-agent; runs in a sandbox.

The agent runs without a terminal, with its own configuration and mini.yaml, which adds limits and the
endpoint's model. The verifiers get the repaired file or, for a task without a file, the agent's submitted
output.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
    "MSWEA_SILENT_STARTUP": "1",
    "OPENAI_API_BASE": os.environ["OPENAI_BASE_URL"],
}
LIMITS = Path(__file__).with_name("mini.yaml")
TRAJECTORY = Path("/tmp/trajectory.json")


def main() -> None:
    """Run the agent on the task in `TETHER_TASK`, and write the answer to `TETHER_OUTCOME`."""
    task: dict[str, Any] = json.loads(Path(os.environ["TETHER_TASK"]).read_text())
    for name, text in task["metadata"]["files"].items():
        Path(name).write_text(text)
    words = ["-c", "mini_textbased.yaml", "-c", str(LIMITS), "-m", "openai/policy", "-t", task["text"]]
    subprocess.run(
        [sys.executable, "-m", "minisweagent.run.mini", *words, "-y", "-l", "0", "--exit-immediately"]
        + ["--agent-class", "default", "-o", str(TRAJECTORY)],
        env={**os.environ, **VARIABLES},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    answer = json.loads(TRAJECTORY.read_text())["info"].get("submission") or ""
    if task["metadata"]["rung"] != "line" and Path("solution.py").is_file():
        answer = Path("solution.py").read_text()
    Path(os.environ["TETHER_OUTCOME"]).write_text(json.dumps({"reward": None, "answer": answer}))


if __name__ == "__main__":
    main()
