"""Fuzzes every decoder in turn, each in a process of its own, in bounded memory.

    python -m tests.trials.fuzz.run --seconds N [--target T] [--runs N]

Prints one line of JSON: seconds, and for each target its executions and crashes. An input that crashes a
target is kept under OUT/TARGET/ and its traceback is shown; exit code 1 if there is one. OUT/TARGET/corpus
keeps the inputs that found something new, and the next run begins with it.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found]
import msgpack

with atheris.instrument_imports(include=["protocol", "services", "reward", "rollout", "trainer", "zmq.auth"]):
    from tests.trials.fuzz import given, stored, wire
from protocol.codec import wrap
from protocol.host.prctl import die_with_parent
from tests.trials.fuzz.mutate import mutator
from tests.trials.fuzz.target import Form, Target

TARGETS: dict[str, Target] = {**wire.TARGETS, **stored.TARGETS, **given.TARGETS}
MEMORY_MB = 2048
"""Resident memory and single allocations beyond this are crashes."""
HANG_S = 60
"""One input that takes longer is a crash."""
MAX_BYTES = 1 << 16
DONE = re.compile(rb"stat::number_of_executed_units:\s*(\d+)")
WORD = re.compile(rb"[A-Za-z_][A-Za-z_.]{2,30}")


@dataclass(slots=True)
class Tally:
    """Results of one target."""

    executions: int = 0
    crashes: int = 0


def main() -> None:
    """Fuzz for the given time, divided evenly."""
    parser = argparse.ArgumentParser(description="fuzz every decoder in turn")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--target", choices=sorted(TARGETS), action="append", help="only this one; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--seed", type=int, default=0, help="0 draws one")
    parser.add_argument("--runs", type=int, default=-1, help="inputs of a target at most; -1: no limit")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    began = time.monotonic()
    tallies = {}
    for i, name in enumerate(names):
        left = arguments.seconds - (time.monotonic() - began)
        seconds = max(1.0, left / (len(names) - i))
        tallies[name] = fuzz(name, arguments.out / name, seconds, arguments.runs, arguments.seed)
    crashes = sum(tally.crashes for tally in tallies.values())
    executions = sum(tally.executions for tally in tallies.values())
    totals = {"seconds": round(time.monotonic() - began, 1), "executions": executions, "crashes": crashes}
    print(
        json.dumps({**totals, "targets": {name: asdict(tally) for name, tally in tallies.items()}}),
        flush=True,
    )
    sys.exit(bool(crashes))


def fuzz(name: str, place: Path, seconds: float, runs: int, seed: int) -> Tally:
    """Fuzz one target in a child process until its time or its runs are up, or it has crashed."""
    target = TARGETS[name]
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(content)
    (place / "words").write_bytes(
        b"".join(b'"%s"\n' % word for word in sorted(set(WORD.findall(b" ".join(target.seeds)))))
    )
    log = place / "log"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        pid = os.fork()
        if not pid:
            _child(
                target,
                place,
                Path(scratch),
                log,
                (f"-max_total_time={max(1, int(seconds))}", f"-runs={runs}", f"-seed={seed}"),
            )
        _, status = os.waitpid(pid, 0)
    text = log.read_bytes()
    tally = Tally(executions=max(map(int, DONE.findall(text)), default=0), crashes=int(status != 0))
    if tally.crashes:
        sys.stderr.write(
            f"fuzz {name}: crashed, inputs in {place}\n{text[-6000:].decode(errors='replace')}\n"
        )
    return tally


def _child(target: Target, place: Path, scratch: Path, log: Path, limits: Sequence[str]) -> None:
    """Fuzz in this process within libFuzzer's `limits`. Never returns: libFuzzer ends the process."""
    die_with_parent(signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    words = [f"-dict={place / 'words'}"] if (place / "words").stat().st_size else []
    options = [
        "fuzz", *limits, f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-malloc_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}", f"-artifact_prefix={place}/",
        "-print_final_stats=1", *words,
        str(place / "corpus"),
    ]  # fmt: skip
    try:
        atheris.Setup(
            options, lambda data: target.check(bytes(data), scratch), custom_mutator=_mutator(target)
        )
        atheris.Fuzz()
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(1)


def _mutator(target: Target):  # type: ignore[no-untyped-def]
    load, dump = {
        Form.BYTES: (_none, _none),
        Form.MSGPACK: (_unpack, msgpack.packb),
        Form.FRAME: (_unpack, _mended),
        Form.JSON: (json.loads, lambda value: json.dumps(value).encode()),
        Form.LINES: (
            lambda data: [json.loads(line) for line in data.splitlines() if line],
            lambda lines: b"".join(json.dumps(line).encode() + b"\n" for line in lines),
        ),
    }[target.form]
    # Fuzz() puts another function in the place of atheris.Mutate
    return mutator(load, dump, lambda data, size: atheris.Mutate(data, size), target.seeds)


def _none(value: object) -> bytes:
    raise ValueError("these inputs have no form")


def _unpack(data: bytes) -> object:
    return msgpack.unpackb(data, strict_map_key=False)


def _mended(frame: Any) -> bytes:
    """Return a frame with its checksum corrected, where its fields allow one."""
    names = {name: frame[name] for name in ("run", "id", "epoch", "group", "token")}
    return wrap(msgpack.packb(frame["payload"]), **names)


if __name__ == "__main__":
    main()
