"""What every tracker has to do, with its real library.

`python -m tests.contracts.tracker_suite KIND DIR` runs it where the library is installed, and prints a
line for each property.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from services.settings.tracking import TABLES
from services.tracking.base import TrackedPoint, TrackerOptions
from services.tracking.registry import open_tracker
from tests.integration.command import until

Values = dict[str, list[tuple[int, float]]]
"""Name -> (version, value), as the library gives it back."""
REWARD = "train/reward_mean"
SCORE = "eval/held-out/greedy"


def options(directory: Path, **fields: Any) -> TrackerOptions:
    folder = directory / "kind"
    folder.mkdir(exist_ok=True)
    settings = {"run.steps": 3, "optimizer.lr": 1e-4, "engine.name": "scripted", "lora.on": True}
    known: dict[str, Any] = {
        "project": "tether-test", "name": "a-run", "tags": ("one", "two"), "settings": settings,
        "directory": folder, "offline": True,
    }  # fmt: skip
    return TrackerOptions(**known | fields)


def point(ordinal: int, version: int | None = None, reward: float | None = None) -> TrackedPoint:
    version = ordinal + 1 if version is None else version
    value = version / 8 if reward is None else reward
    return TrackedPoint(ordinal, version, 1.8e9 + ordinal, {REWARD: value, "train/lag_histogram/0": 4.0})


def values_come_back(kind: str, directory: Path, read: Callable[[Path, str], Values]) -> None:
    tracker = open_tracker(kind, options(directory))
    tracker.log([point(0), point(1)])
    tracker.log([TrackedPoint(2, 2, 1.8e9, {SCORE: 0.5}), point(3, 3)])
    tracker.close()
    assert tracker.run_id
    assert tracker.url
    found = read(directory / "kind", tracker.run_id)
    assert found[REWARD] == [(1, 0.125), (2, 0.25), (3, 0.375)], found
    assert found[SCORE] == [(2, 0.5)], found
    assert found["train/lag_histogram/0"] == [(1, 4.0), (2, 4.0), (3, 4.0)], found


def run_is_continued_without_repeating_a_step(
    kind: str, directory: Path, read: Callable[[Path, str], Values]
) -> None:
    first = open_tracker(kind, options(directory))
    first.log([point(0), point(1)])
    first.close()
    second = open_tracker(kind, options(directory, run_id=first.run_id, next_version=3))
    second.log([point(2)])
    second.close()
    assert second.run_id == first.run_id
    assert read(directory / "kind", first.run_id)[REWARD] == [(1, 0.125), (2, 0.25), (3, 0.375)]


def steps_made_again_are_taken(kind: str, directory: Path, read: Callable[[Path, str], Values]) -> None:
    """After a rewind versions come again; the newest value of each is there, and the last one."""
    tracker = open_tracker(kind, options(directory))
    tracker.log([point(0), point(1), point(2)])
    tracker.log([point(3, 2, 0.75), point(4, 3, 0.875)])
    tracker.close()
    found = read(directory / "kind", tracker.run_id)[REWARD]
    assert dict(sorted(found, key=lambda item: item[0])) == {1: 0.125, 2: 0.75, 3: 0.875}, found


def samples_do_not_hide_numbers(kind: str, directory: Path, read: Callable[[Path, str], Values]) -> None:
    """Libraries with tables keep each text of each sample; all of them keep the numbers."""
    rows = [(0, 7, "2+2=", f"4 é {n}", 1.0, '{"math": 1.0}', 3, "stop") for n in range(3)]
    tracker = open_tracker(kind, options(directory))
    tracker.log([point(0)._replace(samples=rows), point(1)])
    tracker.close()
    assert read(directory / "kind", tracker.run_id)[REWARD] == [(1, 0.125), (2, 0.25)]
    if kind in TABLES:
        kept = b"".join(path.read_bytes() for path in (directory / "kind").rglob("*") if path.is_file())
        for row in rows:
            assert any(spelling in kept for spelling in spellings(str(row[3]))), row


def spellings(text: str) -> list[bytes]:
    """The text as JSON files may have it."""
    return [text.encode(), json.dumps(text)[1:-1].encode()]


PROPERTIES = (
    values_come_back,
    run_is_continued_without_repeating_a_step,
    steps_made_again_are_taken,
    samples_do_not_hide_numbers,
)


# -- readers: independent of the writers
def read_tensorboard(directory: Path, run_id: str) -> Values:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: [(item.step, item.value) for item in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def read_wandb(directory: Path, run_id: str) -> Values:
    """Offline runs of one id, oldest first, from their .wandb files, which its own process writes."""
    from wandb.proto.wandb_internal_pb2 import Record

    def records(path: Path) -> list[Any] | None:
        if not path.is_file():
            return None
        found = [Record.FromString(data) for data in wandb_records(path.read_bytes())]
        return found if found and found[-1].HasField("exit") else None

    found: Values = {}
    folders = until(
        lambda: list(directory.glob(f"wandb/offline-run-*-{run_id}")) or None, seconds=60, what="a folder"
    )
    paths = [folder / f"run-{run_id}.wandb" for folder in folders]
    for path in sorted(paths, key=lambda path: path.parent.stat().st_mtime_ns):
        for record in until(lambda path=path: records(path), seconds=60, what=f"the end of {path}"):  # type: ignore[misc]
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            for name, value in row.items():
                if "/" in name:
                    found.setdefault(name, []).append((int(row["version"]), value))
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    block, place, record = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_mlflow(directory: Path, run_id: str) -> Values:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/mlflow.db")
    run = client.get_run(run_id)
    assert (run.info.run_name, run.data.tags["one"], run.data.params["run.steps"]) == ("a-run", "true", "3")
    assert run.info.status == "FINISHED"
    return {
        name: [(item.step, item.value) for item in sorted(client.get_metric_history(run_id, name), key=_when)]
        for name in run.data.metrics
    }


def _when(metric: Any) -> tuple[int, int]:
    return metric.timestamp, metric.step


def read_trackio(directory: Path, run_id: str) -> Values:
    """The tables of its SQLite file."""
    import sqlite3

    (path,) = directory.rglob("tether-test*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run_id,))
        found: Values = {}
        for step, data in rows:
            for name, value in json.loads(data).items():
                found.setdefault(name, []).append((step, value))
    return found


READERS = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio,
}  # fmt: skip


def main() -> None:
    """Run each property in a process of its own: libraries keep a folder for as long as they live."""
    kind, place, *chosen = sys.argv[1:]
    for check in PROPERTIES:
        if not chosen:
            command = [sys.executable, "-m", __spec__.name, kind, place, check.__name__]
            subprocess.run(command, check=True)
            print(f"{kind}: {check.__name__}: holds", flush=True)
        elif chosen == [check.__name__]:
            directory = Path(place) / check.__name__
            directory.mkdir(parents=True)
            check(kind, directory, READERS[kind])


if __name__ == "__main__":
    main()
