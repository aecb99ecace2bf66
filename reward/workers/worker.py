"""Runs verifiers in a worker process: `python -m reward.workers.worker`, started by `client.py`.

Frames in both directions: 4 bytes of length, little-endian, and a MessagePack array.

    in   [memory_mb, modules, [[verifier, options], ...]]   once
    out  ["ready"] or ["settings", text]                    once
    in   [prompt_text, responses, metadata]                 per group
    out  ["score", number]                                  per verifier and response, verifiers outermost
         or ["error", text]                                 ends the group
"""

import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from protocol.errors import SettingsError
from protocol.host.parent_death import die_with_parent
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from reward.verifiers.registry import Score, make_verifier

LENGTH = struct.Struct("<I")


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    die_with_parent(signal.SIGKILL)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of verifiers goes to the log, not between the frames
    memory_mb, modules, configured = _read(source)
    sys.path.extend(modules)  # last, so that none replaces a module of ours
    try:
        verifiers = [make_verifier(name, options) for name, options in configured]
    except SettingsError as error:
        _write(sink, ["settings", str(error)])
        return
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    _write(sink, ["ready"])
    while (group := _read(source)) is not None:
        _score(sink, verifiers, *group)


def _score(
    sink: BinaryIO, verifiers: list[Score], prompt_text: str, responses: list[str], packed: bytes
) -> None:
    try:
        check_shape(packed, most_depth=METADATA_DEPTH)
        metadata = msgspec.msgpack.decode(packed, type=dict[str, Any])
        for verifier in verifiers:
            for response in responses:
                _write(sink, ["score", verifier(prompt_text, response, metadata)])
    except BrokenPipeError:
        raise
    except Exception as error:  # verifiers may raise anything; the process can score the next group
        _write(sink, ["error", f"{type(error).__name__}: {error}"[:500]])


def _read(source: BinaryIO) -> Any:
    """Return the next frame, or None at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(source.read(*LENGTH.unpack(head)))


def _write(sink: BinaryIO, frame: list[Any]) -> None:
    data = msgspec.msgpack.encode(frame)
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
