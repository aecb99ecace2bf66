"""Runs verifiers in a worker process: `python -m reward.workers.worker`, started by `client.py`.

Frames in both directions: 4 bytes of length, little-endian, and a MessagePack array.

    in   [memory_mb, timeout_s, modules, [[verifier, options], ...]]                  once
    out  ["ready", [at_once, ...], [awaits, ...], [by_turn, ...]] or ["settings", text]    once, all loaded
    in   ["group", prompt_text, responses, metadata, token_counts, finish_reasons, turns, contexts]
                                                                                     no answer
    in   ["call", verifier, [sample, ...]]                                            of the last group
    out  ["scores", [number or [number, ...], ...]], or ["error", text]

Verifiers that wait (`AwaitedVerifier`) run in `async_worker.py`; here their options are checked, no more.
"""

import asyncio
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.host.parent_death import die_with_parent
from protocol.host.privacy import keep_private
from protocol.msgpack_limits import METADATA_DEPTH, check_shape
from reward.group import ResponseGroup
from reward.verifiers.awaited import AwaitedVerifier
from reward.verifiers.location import locate
from reward.verifiers.registry import LoadedVerifier, make_verifier

LENGTH = struct.Struct("<I")
MAX_ERROR = 500
"""Characters of an error that are sent."""
MOST_TRACES = 100
"""Different exceptions whose traceback is printed."""


def main() -> None:
    """Serve until standard input ends or the parent dies."""
    source, sink, memory_mb, _, configured = begin()
    try:
        verifiers = [make_verifier(name, options) for name, options in configured]
        loaded = _load([item for item in verifiers if not isinstance(item, AwaitedVerifier)], memory_mb)
    except SettingsError as error:
        write_frame(sink, ["settings", str(error)])
        return
    if memory_mb:
        limit = (memory_mb << 20) + loaded
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    awaits = [isinstance(verifier, AwaitedVerifier) for verifier in verifiers]
    by_turn = [verifier.by_turn for verifier in verifiers]
    write_frame(sink, ["ready", [verifier.at_once for verifier in verifiers], awaits, by_turn])
    printed: set[str] = set()
    group: ResponseGroup | str = "no group"
    while (frame := read_frame(source)) is not None:
        kind, *rest = frame
        if kind == "group":
            group = decode_group(*rest)
        else:
            number, samples = rest
            verifier = verifiers[number]
            assert not isinstance(verifier, AwaitedVerifier)
            write_frame(sink, _call(verifier, group, samples, printed))


def begin() -> tuple[BinaryIO, BinaryIO, int, float, list[Any]]:
    """Tie this process to its parent and read the first frame.

    Returns:
        Where frames come from and go to, `memory_mb`, `timeout_s`, and the verifiers with their options.
    """
    die_with_parent(signal.SIGKILL)
    keep_private()  # its variables may have a judge's key
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of verifiers goes to the log, not between the frames
    memory_mb, timeout_s, modules, configured = read_frame(source)
    sys.path.extend(modules)  # last, so that none replaces a module of ours
    return source, sink, memory_mb, timeout_s, configured


def _load(verifiers: Sequence[LoadedVerifier], memory_mb: int) -> int:
    """Load what verifiers need; return the bytes of address space that it takes, beside the limit.

    Raises:
        SettingsError: something cannot be loaded, or not under a limit.
    """
    if memory_mb and any(verifier.maps_device_memory for verifier in verifiers):
        raise SettingsError(
            f"setting reward.memory_mb: {memory_mb} limits address space, and a verifier on a GPU maps more "
            "than it uses: set it to 0"
        )
    before = _mapped()
    for verifier in verifiers:
        verifier.load()
    return max(0, _mapped() - before)


def _mapped() -> int:
    """Return the bytes of this process's address space that are in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def decode_group(
    prompt_text: str,
    responses: list[str],
    packed: bytes,
    token_counts: list[int],
    finish_reasons: list[str],
    turns: list[list[str]],
    contexts: list[list[str]],
) -> ResponseGroup | str:
    """Return the group of a frame, or what is wrong with its metadata."""
    try:
        check_shape(packed, most_depth=METADATA_DEPTH)
        metadata = msgspec.msgpack.decode(packed, type=dict[str, Any])
    except Exception as error:  # whatever the decoder raises
        return f"{type(error).__name__}: {error}"[:MAX_ERROR]
    return ResponseGroup(prompt_text, responses, metadata, token_counts, finish_reasons, turns, contexts)


def _call(
    verifier: LoadedVerifier, group: ResponseGroup | str, samples: Sequence[int], printed: set[str]
) -> list[Any]:
    if isinstance(group, str):
        return ["error", group]
    try:
        return ["scores", verifier.score(group, samples)]
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # verifiers may raise anything
        return ["error", describe_error(error, verifier.file, printed)]


def describe_error(error: BaseException, file: str, printed: set[str]) -> str:
    """Return an exception of a verifier as text; print the traceback of a new one from the user's code.

    Args:
        error: what the verifier raised.
        file: of the user, that the verifier comes from, or "".
        printed: places whose traceback was printed.
    """
    text = f"{type(error).__name__}: {error}"
    if file and not isinstance(error, RewardError):
        place = locate(error, file)
        text = f"{place}: {text}" if place else text
        if place not in printed and len(printed) < MOST_TRACES:
            printed.add(place)
            traceback.print_exception(error)
    return text[:MAX_ERROR].encode(errors="replace").decode()  # half of a surrogate pair fits no frame


def read_frame(source: BinaryIO) -> Any:
    """Return the next frame, or None at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(source.read(*LENGTH.unpack(head)))


def write_frame(sink: BinaryIO, frame: list[Any]) -> None:
    """Write a frame."""
    data = msgspec.msgpack.encode(frame)
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main()
