"""Runs one command line in the sandbox: the tool `shell` starts it there as a program of its own.

It stands alone, since the project cannot be imported in the sandbox. It reads {"command", "files", "wall_s",
"output", "directory"} and writes {"said", "ended", "status", "files"}; `files` is the directory as an
archive, in base64, which is packed and unpacked in the sandbox alone.
"""

import base64
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time

WORK = "work"
POLL_S = 0.05


def main() -> None:
    """Unpack the files, run the command, and pack the files again."""
    request = json.load(sys.stdin)
    os.mkdir(WORK)
    if request["files"]:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(request["files"])), mode="r:gz") as files:
            files.errorlevel = 0  # what cannot be unpacked is left out
            files.extractall(WORK)
    said, ended, status = run(request["command"], request["wall_s"], request["output"])
    packed = pack(request["directory"])
    shutil.rmtree(WORK, ignore_errors=True)  # room for the output
    text = said.decode(errors="replace")
    json.dump({"said": text, "ended": ended, "status": status, "files": packed}, sys.stdout)


def run(command: str, wall_s: float, most: int) -> tuple[bytes, str, int]:
    """Return a command's output, why it was ended ("time", "output" or empty), and its status."""
    process = subprocess.Popen(
        [shutil.which("bash") or "/bin/sh", "-c", command], cwd=WORK, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "HOME": os.path.abspath(WORK)},
    )  # fmt: skip
    assert process.stdout is not None
    out, output, ended, is_open = process.stdout.fileno(), b"", "", True
    deadline = time.monotonic() + wall_s
    while not ended:
        is_done = process.poll() is not None
        ready = is_open and bool(select.select([out], [], [], 0 if is_done else POLL_S)[0])
        data = os.read(out, 1 << 16) if ready else b""
        output, is_open = output + data, is_open and (bool(data) or not ready)
        if is_done and not data:
            break
        if not is_open:
            time.sleep(POLL_S)
        ended = "output" if len(output) > most else "time" if time.monotonic() > deadline else ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return output[:most], ended, process.wait()


def pack(most: int) -> str | None:
    """Return the directory as an archive; None if it has more than `most` bytes."""
    size = 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as files:
        for folder, names, found in os.walk(WORK):
            for name in (*names, *found):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # it may vanish meanwhile
                    entry = files.gettarinfo(path, os.path.relpath(path, WORK))
                    if entry is None or not (entry.isreg() or entry.isdir() or entry.issym()):
                        continue
                    size += entry.size + 512
                    if size > most:
                        return None
                    if entry.isreg():
                        with open(path, "rb") as file:
                            files.addfile(entry, io.BytesIO(file.read(entry.size).ljust(entry.size, b"\0")))
                    else:
                        files.addfile(entry)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main()
