"""What `tether verify --files` finds in the directory of a real run, and what it does not cover."""

import asyncio
import random
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from protocol.weights.lora import LoraConfig
from services.run_record.damage import CHECKS, check_files
from services.runtime.frozen_models import record_digests
from services.settings.load import FILE as SETTINGS
from services.settings.load import dump_settings
from services.settings.resume import EARLIER
from services.tools.verification import render_verification, verify_run
from tests.integration.loop import run_to_end, settings_for
from trainer.lora import save_adapter

FLIPS = 80
LEARNING = (
    "engine.name=hf", "trainer.backend=reference", "bound.groups_per_step=4", "sampling.samples_per_prompt=2",
    "engine.max_model_len=256", "model.scratch.max_position_embeddings=256", "rollout.groups_in_flight=8",
    "trainer.checkpoint_every=2", "run.steps=5", "eval.every=2", "eval.samples=2", "eval.prompts=4",
    "eval.best=held_out/sampled", "monitor.enabled=false", "environment.name=agent",
    'environment.options={function="tests.integration.two_calls:solve"}',
)  # fmt: skip
ROWS = (
    "SELECT grp, token, payload, sum FROM records",
    "SELECT grp, sample, number, token, payload, sum FROM calls",
    "SELECT seq, ledger_seq, payload, sum FROM journal",
)
"""What the checksums of the spool cover: not times, leases that may add calls, and its name."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("damage")]  # one fixture for the module


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with sessions, checkpoints, exports and evaluations that came to its end."""
    run_dir = tmp_path_factory.mktemp("files") / "run"
    settings = settings_for(run_dir, "demo.toml", *LEARNING)
    asyncio.run(run_to_end(settings))
    dump_settings(settings, run_dir / SETTINGS)
    shutil.copy(run_dir / SETTINGS, run_dir / EARLIER.replace("*", "3"))
    record_digests(run_dir, {"teacher": "0" * 32})
    shutil.rmtree(run_dir / "evaluation")
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def covered(run_dir: Path) -> list[Path]:
    """The files that are read, but for the spool, whose pages have bytes that carry no data."""
    left = check_files(run_dir).not_covered
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "best")
    names = [path.relative_to(run_dir).as_posix() for path in files if path.name != "spool.sqlite"]
    return [run_dir / name for name in sorted(names) if not name.startswith(tuple(left))]


def flip(path: Path, place: int, change: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ change]))


def test_a_whole_run_is_not_damaged_and_what_is_not_covered_is_named(run_dir: Path) -> None:
    found = check_files(run_dir)
    assert found.damaged == []
    assert found.not_covered == ["ledger/", "model/"]
    files = {path.relative_to(run_dir).as_posix() for path in covered(run_dir)}
    assert found.checked == len(files) + 1
    assert {"audit.jsonl", "audit.head", "metrics.jsonl", "eval.jsonl", "settings.json"} <= files
    assert {"frozen_models.json", "exports/best.json", "checkpoints/step_00000004/manifest.json"} <= files
    assert {"exports/step_00000005/checksums.json", "exports/step_00000005/model.safetensors"} <= files
    assert {f"archive/step_{step:08d}.msgpack" for step in range(4)} <= files
    with closing(sqlite3.connect(run_dir / "spool.sqlite")) as connection:
        assert all(connection.execute(rows).fetchall() for rows in ROWS)
    assert all(any(run_dir.glob(pattern)) for pattern, *_ in CHECKS if pattern != "hub.json")


def test_every_flipped_byte_of_the_covered_files_is_found_and_its_file_named(run_dir: Path) -> None:
    draw, files = random.Random(29), covered(run_dir)
    for _ in range(FLIPS):
        path = draw.choice(files)
        place, change = draw.randrange(path.stat().st_size), draw.randrange(1, 256)
        flip(path, place, change)
        named = {line.partition(":")[0].replace(".head", ".jsonl") for line in check_files(run_dir).damaged}
        name = path.relative_to(run_dir).as_posix()
        assert name.replace(".head", ".jsonl") in named, (name, place, change, named)
        flip(path, place, change)
    assert check_files(run_dir).damaged == []


def rows_of(spool: Path) -> list[list[tuple[object, ...]]] | None:
    """All that the spool's checksums cover; None if it cannot be read."""
    try:
        with closing(sqlite3.connect(spool)) as connection:
            return [sorted(connection.execute(rows).fetchall()) for rows in ROWS]
    except (sqlite3.Error, UnicodeDecodeError, TypeError):
        return None


def test_every_flipped_byte_of_the_spool_is_found_or_changes_no_row(run_dir: Path) -> None:
    spool, draw, found = run_dir / "spool.sqlite", random.Random(31), 0
    whole, before = spool.read_bytes(), rows_of(spool)
    for _ in range(FLIPS):
        place = draw.randrange(len(whole))
        flip(spool, place, draw.randrange(1, 256))
        damaged = check_files(run_dir).damaged
        assert damaged or rows_of(spool) == before, place
        assert all(line.startswith("spool.sqlite: ") for line in damaged)
        found += bool(damaged)
        spool.write_bytes(whole)
    assert found > FLIPS // 10  # most pages of a spool that has forgotten groups are free
    assert check_files(run_dir).damaged == []


def test_a_flipped_byte_of_a_row_is_named_by_its_group(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "spool.sqlite")) as connection:
        group, token, payload = connection.execute("SELECT grp, token, payload FROM records").fetchone()
        sample, number, call = connection.execute(
            "SELECT sample, number, payload FROM calls WHERE grp = ?", (group,)
        ).fetchone()
        seq, entry = connection.execute("SELECT seq, payload FROM journal").fetchone()
        for table, where, data in (
            ("records", f"grp = {group}", payload),
            ("calls", f"grp = {group} AND sample = {sample} AND number = {number}", call),
            ("journal", f"seq = {seq}", entry),
        ):
            damaged = bytes([*data[:-1], data[-1] ^ 1])
            connection.execute(f"UPDATE {table} SET payload = ? WHERE {where}", (damaged,))
        connection.commit()
    assert check_files(run_dir).damaged == [
        f"spool.sqlite: the record of group {group} under lease {token} is not what was written",
        f"spool.sqlite: call {number} of sample {sample} of group {group} is not what was written",
        f"spool.sqlite: entry {seq} of the journal is not what was written",
    ]


def test_a_missing_log_or_list_is_named(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "exports/step_00000005/checksums.json").unlink()
    (run_dir / "exports/step_00000004/config.json").unlink()
    assert check_files(run_dir).damaged == [
        "metrics.jsonl: is missing, and metrics.head is there",
        "exports/step_00000004/config.json: cannot be read: No such file or directory",
        "exports/step_00000005/checksums.json: cannot be read: No such file or directory",
    ]


def test_a_last_line_that_a_loss_of_power_cut_is_named_as_cut(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run_dir / name).write_bytes((run_dir / name).read_bytes()[:-9])
    steps, evaluations = check_files(run_dir).damaged
    assert steps == (
        "metrics.jsonl: line 5, its last one, is cut: the newest line that metrics.head names is missing; "
        "the next start of the run writes again what a loss of power cut"
    )
    assert evaluations.endswith(", is cut: the newest line that eval.head names is missing")


def test_folders_that_a_run_removes_meanwhile_are_left_out(tmp_path: Path) -> None:
    ended = threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            for name in "abcdefgh":
                (tmp_path / "weights" / name / "parts").mkdir(parents=True)
            shutil.rmtree(tmp_path / "weights")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(make_and_remove)
        try:
            found = [check_files(tmp_path) for _ in range(200)]
        finally:
            ended.set()
        running.result()
    assert not any(files.damaged for files in found)


def test_an_adapter_has_checksums(run_dir: Path) -> None:

    adapter = run_dir / "exports/adapter_step_00000005"
    save_adapter([("a.lora_A.weight", torch.ones(2, 4))], adapter, LoraConfig(rank=2), run_dir / "model")
    assert check_files(run_dir).damaged == []
    flip(adapter / "adapter_model.safetensors", 9, 1)
    (line,) = check_files(run_dir).damaged
    assert line.startswith("exports/adapter_step_00000005/adapter_model.safetensors: is damaged")


def test_verification_with_files_reports_the_log_the_calls_and_the_files(run_dir: Path) -> None:
    facts = verify_run(run_dir, files=True)
    assert (facts["violations"], facts["damaged"], facts["calls"] > 0) == ([], [], True)
    assert "not covered: ledger/, model/" in render_verification(facts)
    assert "damaged" not in verify_run(run_dir)
    flip(run_dir / "eval.jsonl", 3, 1)
    text = render_verification(verify_run(run_dir, files=True))
    assert "damaged 1" in text
    assert "\ndamaged: eval.jsonl: line 1 is not what was written" in text
