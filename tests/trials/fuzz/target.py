"""Defines a fuzz target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Form(Enum):
    """Form of inputs, so that mutations can keep them well-formed."""

    BYTES = "bytes"
    MSGPACK = "msgpack"
    FRAME = "frame"  # an envelope whose checksum is mended
    JSON = "json"
    LINES = "lines"  # a JSON document a line


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder."""

    check: Callable[[bytes, Path], None]
    """Called with an input and a scratch directory in memory. Raises if the decoder breaks its promise: it
    gives a value, which encodes to an equal one where there is an encoder, or raises its own error, and
    nothing else."""
    seeds: Sequence[bytes]
    form: Form = Form.BYTES
