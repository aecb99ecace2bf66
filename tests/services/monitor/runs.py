"""Finished runs for tests of the monitor: the recorded one of tests/fixtures, and made-up metrics."""

import asyncio
import json
import random
import tarfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from protocol.codec import encode_payload
from protocol.messages import Remark, ScoredRollout
from protocol.tensors import Array
from services.monitor.standalone import StandaloneMonitor
from services.settings.load import run_settings
from services.settings.sections import Settings
from tests.integration.loop import ROOT
from tests.protocol.samples import BRANCHED
from trainer.storage.archive import Archive
from trainer.storage.stored import StoredMessage

PACKED = ROOT / "tests/fixtures/recorded_run.tar.gz"


def recorded_run(directory: Path) -> Path:
    """Unpack a run that was interrupted at version 7, and return its directory; its ledger is not running."""
    with tarfile.open(PACKED) as packed:
        packed.extractall(directory, filter="data")
    return directory


def put_branched(run_dir: Path) -> int:
    """Put a group of two samples, of which the first has two branches, in the place of one of step 2; returns
    its number."""
    archive = Archive(run_dir / "archive", 100)
    record = archive.records(2)[0]
    rollout = msgspec.structs.replace(BRANCHED, group=record.group, token=record.token)
    remarks = (Remark(verifier="quality", sample=0, text="Good <b>indeed</b>."),)
    message = ScoredRollout(rollout=rollout, rewards=Array.of([1.0, 0.0], "float32"), remarks=remarks)
    (run_dir / "spool.sqlite").unlink()
    archive.put(2, [StoredMessage.received(record.group, record.token, encode_payload(message))])
    return record.group


def step_line(step: int, epoch: str = "e1", **fields: Any) -> dict[str, Any]:
    """A line of metrics.jsonl with plausible numbers."""
    draw = random.Random(f"{step} {epoch}")
    numbers = {
        "reward_mean": draw.random(),
        "reward_std": 0.4,
        "lag_mean": draw.random(),
        "lag_max": step % 3,
        "loss": draw.gauss(0, 0.01),
        "entropy": draw.random(),
        "grad_norm": draw.random(),
        "clip_fraction": draw.random() / 10,
        "ratio_mean": draw.gauss(1, 0.01),
        "logprob_error_max": draw.random() * 1e-3,
        "response_length_mean": 100 * draw.random(),
        "trained_tokens": draw.randrange(10_000),
        "masked_tokens": draw.randrange(100),
        "wasted_tokens": draw.randrange(1000),
        "groups": 16,
        "dropped_groups": step % 2,
        "generate_s": draw.random(),
        "train_s": draw.random(),
        "publish_s": draw.random() / 10,
        "wait_s": draw.random() / 10,
        "step_s": 2 + draw.random(),
        "pause_ms": draw.random(),
        "engine_busy": draw.random(),
        "lag_in_flight_mean": draw.random(),
        "lag_in_queue_mean": draw.random(),
        "behaviour_kl_k3": draw.random() / 100,
        "importance_mean": draw.gauss(1, 0.01),
        "importance_max": 1 + draw.random(),
        "importance_ess": draw.random(),
        "behaviour_clip_fraction": draw.random() / 10,
        "mismatch_mean": draw.random() * 1e-5,
        "mismatch_max": draw.random() * 1e-3,
        "token_mult_prob_error": 1 + draw.random() * 1e-5,
        "time": 1.8e9 + step,
    }
    histogram = {str(lag): draw.randrange(1, 1000) for lag in range(step % 3 + 1)}
    return {"step": step, "version": step + 1, "epoch": epoch, "lag_histogram": histogram, **numbers} | fields


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def offline_settings(run_dir: Path, *overrides: str) -> Settings:
    """Settings of a run whose ledger is not waited for."""
    return run_settings(run_dir, ["ledger.retry_s=0", "ledger.timeout_s=3", *overrides])


@asynccontextmanager
async def monitored(settings: Settings, other: Path | None = None) -> AsyncIterator[str]:
    """The URL of the page of a run, with another one laid over it, served while the block runs."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(StandaloneMonitor(settings, other).run(stop, url.set_result), name="monitor")
        try:
            yield await url
        finally:
            stop.set()
