"""The scripts for Slurm make a run: here a stand-in for `srun` starts what Slurm would start on the hosts."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from services.run_record.steps import read_steps
from tests.integration.command import audit, environment, processes_of, until
from tests.integration.loop import ROOT
from tests.integration.test_hosts import FIRST, free_port

STEPS = 4
STAND_INS = {
    "scontrol": f"echo {FIRST}; sleep 0.3; echo 127.0.0.3",
    "scancel": 'touch "$RUN_DIR/cancelled"',
    "srun": """
nodes=$SLURM_JOB_NUM_NODES pids=() code=0
while [[ $1 == --* ]]; do
  case $1 in --nodes=*) nodes=${1#*=} ;; esac
  shift
done
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node SLURM_STEP_NUM_NODES=$nodes "$@" &
  pids+=("$!")
done
trap 'kill -TERM "${pids[@]}"' TERM
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
done
exit "$code"
""",
}
"""Programs of Slurm, as far as the scripts use them."""


@contextmanager
def job(
    script: str, log: Path, variables: dict[str, str], nodes: int = 1
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a batch script; what is left of it at the end is killed."""
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "h[0-1]",
        "SLURM_JOB_ID": "7", "USER": "me",
    }  # fmt: skip
    with log.open("wb") as out:
        command = ["bash", str(ROOT / "deploy/slurm" / script)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, env=environment(**variables, **slurm)
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            left = psutil.Process(process.pid).children(recursive=True)
            for each in (process, *left):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait(10)


@pytest.mark.slow
def test_the_jobs_of_a_run_make_all_steps(tmp_path: Path) -> None:
    programs, run_dir = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    run_dir.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    python = programs / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    variables = {
        "CONFIG": str(ROOT / "deploy/configs/demo.toml"), "RUN_DIR": str(run_dir), "VENV": str(tmp_path),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TETHER_STEPS": str(STEPS), "TETHER_ENGINE__NAME": "scripted",
        "TETHER_PARALLEL__DATA_PARALLEL_SIZE": "2", "TETHER_BUS__ADVERTISE": FIRST,
        "REDIS_PORT": str(free_port()), "TRAINER_PORT": str(free_port()),
    }  # fmt: skip
    logs = [tmp_path / f"{name}.log" for name in ("rollout", "reward", "trainer")]
    with job("rollout.sbatch", logs[0], variables), job("reward.sbatch", logs[1], variables) as reward:
        with job("trainer.sbatch", logs[2], variables, nodes=2) as trainer:
            assert trainer.wait(500) == 0, logs[2].read_text()
        assert (run_dir / "cancelled").is_file()
        assert reward.poll() is None, logs[1].read_text()
    assert [step["step"] for step in read_steps(run_dir / "metrics.jsonl")] == list(range(STEPS))
    assert audit(run_dir)["violations"] == []
    assert "by SLURM_NODEID, cluster.nodes" in logs[2].read_text()
    until(lambda: processes_of(tmp_path) == [], seconds=30, what="the end of all processes")
