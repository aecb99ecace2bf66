"""Weight updates of serving engines by a real Megatron trainer of several ranks: gathered, converted, staged
and committed while the engine decodes on the same GPUs.

    python -m tests.benchmarks.gpu_reshard.run --out runs/bench-reshard.json --engines vllm:1,vllm:2,sglang:2

ENGINE:N is an engine of N tensor-parallel ranks, on the last N of the trainer's GPUs. It is measured while
the trainer's other ranks wait for commands on a socket of the benchmark, and while they wait as a trainer's
do; ENGINE:N:host and ENGINE:N:gpu are one of both (before ranks waited at torchrun's store, `gpu` was a
kernel on their GPUs). The trainer starts once and continues; each engine
has processes of its own. What fails or hangs is reported, and the others continue.
Results are written after every part; the table comes last. Exit code 1 if something failed.

An engine whose packages lie elsewhere has a PYTHONPATH of its own: --engine-path sglang=DIR:DIR.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.partner import ROOT
from tests.benchmarks.gpu.run import DEFAULTS, Lines, Report, facts_of
from tests.benchmarks.gpu.shapes import SIZES, write_model
from tests.benchmarks.gpu_reshard.table import line, render
from trainer.ranks.launch import torchrun

ON_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment of everything that is started here: the ranks meet also where the host's name is not known."""
TRAINER_S = 180.0 if torch.cuda.is_available() else 400.0
START_S = 200.0 if torch.cuda.is_available() else 600.0
SLACK_S = 45.0
"""For a part's first update and its verification, over the time in which it measures."""
END_S = 45.0
ANSWER_S = 20.0
LEAST_S = 40.0
"""No engine is started with less time left."""


class Trainer:
    """The trainer's processes, started when they are needed."""

    def __init__(
        self, report: Report, arguments: argparse.Namespace, environment: dict[str, str], directory: Path
    ) -> None:
        self._report, self._arguments = report, arguments
        self._environment = environment | {"CUDA_VISIBLE_DEVICES": ",".join(arguments.trainer_gpus)}
        self._directory = directory
        self._lines: Lines | None = None
        self._starts = 0
        self.socket: Path | None = None
        """Where rank 0 takes orders; None: it does not run."""

    def start(self) -> bool:
        """Start it, unless it runs; return whether it runs."""
        if self.socket is not None:
            return True
        self._starts += 1
        sockets = self._directory / f"trainer-{self._starts}"
        sockets.mkdir()
        command = torchrun(
            len(self._arguments.trainer_gpus),
            "tests.benchmarks.gpu_reshard.rank",
            f"--model={self._arguments.model}",
            f"--model-dir={self._directory / 'model'}",
            f"--sockets={sockets}",
            f"--transport={self._arguments.transport}",
            *([f"--backend={self._arguments.backend}"] if self._arguments.backend else []),
            *(["--perturb"] if self._arguments.perturb else []),
        )
        progress("starting the trainer ...")
        self._lines = Lines(command, self._environment)
        event = self._lines.next(TRAINER_S)
        if event["event"] != "ready":
            self._report.fail("trainer", f"not ready: {event['event']}")
            self.end()
            return False
        self.socket = sockets / "0"
        self._report.facts["trainer"] = {key: value for key, value in event.items() if key != "event"}
        self._report.write()
        progress(f"trainer: {event}")
        return True

    def end_unless_well(self) -> None:
        """End it if it does not answer, so that the next engine gets another one."""
        if self.socket is not None and not order(self.socket, "last", ANSWER_S):
            progress("the trainer does not answer")
            self.end()

    def end(self) -> None:
        """Ask it to exit, and end its processes."""
        path, self.socket = self.socket, None
        lines, self._lines = self._lines, None
        well = path is not None and order(path, "exit", ANSWER_S)
        if lines is not None:
            lines.__exit__(None if well else TimeoutError, None, None)


def order(path: Path, do: str, limit_s: float) -> bool:
    """Give the trainer an order; return whether it has answered."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(limit_s)
        connection.connect(str(path))
        connection.sendall(json.dumps({"do": do}).encode() + b"\n")
        return bool(connection.recv(1 << 16))
    return False


def run_engine(
    report: Report,
    arguments: argparse.Namespace,
    environment: dict[str, str],
    name: str,
    trainer: Path,
    end: float,
) -> bool:
    """Measure one engine. Returns whether all went well."""
    engine, ranks, *named = name.split(":")
    waits = named or arguments.waits
    gpus = arguments.trainer_gpus[-int(ranks) :]
    others = [gpu for gpu in arguments.trainer_gpus if gpu not in gpus]
    command = [sys.executable, "-m", "tests.benchmarks.gpu_reshard.session"]
    command += [f"--engine={engine}", f"--ranks={ranks}", f"--model={arguments.model}"]
    command += [f"--model-dir={arguments.model_dir}", f"--trainer={trainer}"]
    command += [f"--updates={arguments.updates}", f"--quiet-s={arguments.quiet_s}"]
    command += [f"--part-s={arguments.part_s}", f"--waits={','.join(waits)}"]
    command += ["--graphs"] if engine in arguments.graphs else []
    path = arguments.engine_path.get(engine)
    environment = environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus + others)}
    environment |= {"PYTHONPATH": path} if path else {}
    progress(f"{name}: starting the engine ...")
    with Lines(command, environment) as lines:
        event = lines.next(min(START_S, end - time.monotonic()))
        if event["event"] != "ready":
            report.fail(name, event.get("error") or f"not ready: {event['event']}")
            return False
        report.facts["engine"][name] = {key: value for key, value in event.items() if key != "event"}
        for where in waits:
            part = f"{engine}:{ranks} {where}"
            event = lines.next(END_S)
            if event["event"] == "begin":
                progress(f"{part} ...")
                event = lines.next(min(arguments.part_s + SLACK_S, max(1.0, end - time.monotonic())))
            if event["event"] != "end":
                report.fail(part, event.get("error") or f"{event['event']}")
                return False
            report.facts["parts"][part] = event["result"]
            report.write()
            progress(f"{part}: {line(event['result'])}")
    return True


def progress(text: str) -> None:
    """Say what happens."""
    print(f"bench-reshard: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench-reshard.json")
    parser.add_argument("--model", choices=SIZES, default="7b")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: a tiny model, also without a GPU")
    parser.add_argument("--engines", type=_words, default=["vllm:1", "vllm:2", "sglang:2", "sglang:1"])
    parser.add_argument("--trainer-gpus", type=_words, default=["0", "1"], help="one for each rank")
    parser.add_argument("--transport", default="ipc" if torch.cuda.is_available() else "shm")
    parser.add_argument("--backend", default="", help="weights.backend, if not that of the device")
    parser.add_argument(
        "--perturb", action="store_true", help="multiply the weights in place of the optimizer's steps"
    )
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything")
    parser.add_argument("--quiet-s", type=float, default=0.6, help="undisturbed before each update")
    parser.add_argument("--part-s", type=float, default=20.0, help="for the measured updates of a part")
    parser.add_argument(
        "--waits", type=_words, default=["host", "gpu"], help="where the trainer's idle ranks wait"
    )
    parser.add_argument("--graphs", type=_words, default=[], help="engines that capture CUDA graphs")
    parser.add_argument("--engine-path", type=_pair, action="append", default=[], metavar="NAME=PATH")
    arguments = parser.parse_args()
    arguments.engine_path = dict(arguments.engine_path)
    if arguments.tiny:
        arguments.model, arguments.updates = "tiny", min(arguments.updates, 2)
    return arguments


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def main() -> None:
    """Measure all engines, print the table."""
    arguments = parse()
    end = time.monotonic() + 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    out: Path = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = DEFAULTS | ON_ONE_HOST | dict(os.environ)
    facts: dict[str, Any] = {"transport": arguments.transport, "trainer": {}}
    report = Report(out, facts_of(arguments) | facts)
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        arguments.model_dir = write_model(arguments.model, directory / "model")
        trainer = Trainer(report, arguments, environment, directory)
        try:
            for engine in arguments.engines:
                if end - time.monotonic() < LEAST_S:
                    report.fail(engine, "not begun: no time is left")
                elif trainer.start() and trainer.socket is not None:
                    if not run_engine(report, arguments, environment, engine, trainer.socket, end):
                        trainer.end_unless_well()
                else:
                    report.fail(engine, "not begun: there is no trainer")
        finally:
            trainer.end()
            print(render(json.loads(out.read_text())), flush=True)
    sys.exit(1 if report.facts["failed"] else 0)


if __name__ == "__main__":
    main()
