"""Detects damage in the write-ahead log of a SQLite file, which SQLite mistakes for the end of the log.

Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log. A header of 32 bytes is followed by
frames of 24 bytes and a page. A frame is valid if it has the salts of the header and the right checksum,
which covers all preceding frames. Frames of an older log, with other salts, may follow.
"""

import struct
from pathlib import Path

HEADER_BYTES, FRAME_BYTES = 32, 24
BIG_ENDIAN = 0x377F0683
"""Magic number of a log with big-endian checksums; little-endian logs have this number minus one."""

_Sums = tuple[int, int]


def damage_in_log(path: Path) -> str | None:
    """Return where a log is damaged; None if it is intact, empty or missing. Raises OSError."""
    data = path.read_bytes() if path.is_file() else b""
    if not data:
        return None
    header = data[:HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return "its header is torn"
    magic, _, page, _ = struct.unpack(">4I", header[:16])
    order = ">" if magic == BIG_ENDIAN else "<"
    sums = _sums(header[:24], order, (0, 0))
    if magic not in (BIG_ENDIAN, BIG_ENDIAN - 1) or sums != struct.unpack(">2I", header[24:]):
        return "its header does not match its checksum"
    salts, size = header[16:24], FRAME_BYTES + page
    frames = [data[at : at + size] for at in range(HEADER_BYTES, len(data) - size + 1, size)]
    last = max((n for n, frame in enumerate(frames, 1) if frame[8:16] == salts), default=0)
    for number, frame in enumerate(frames[:last], 1):
        sums = _sums(frame[:8] + frame[FRAME_BYTES:], order, sums)
        if frame[8:16] != salts or sums != struct.unpack(">2I", frame[16:FRAME_BYTES]):
            return f"frame {number} of {last} does not match its checksum: what came after it is lost"
    return None


def _sums(data: bytes, order: str, before: _Sums) -> _Sums:
    first, second = before
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
