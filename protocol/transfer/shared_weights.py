"""What the files of the transport `shared` describe: the trainer's masters for the engine, the engine's live tensors for the trainer."""

from pathlib import Path

from protocol.transfer.device_memory import SUFFIX

TRANSPORT = "shared"

MASTERS = "masters"
"""Section of the trainer's file: fp32, by checkpoint name."""
HELD, VERSION = "held", "version"
"""Section of the trainer's file with one number: the version that the masters are, -1 while they are written to."""

PARAMETERS = "parameters"
"""Section of an engine's file: the live weights by checkpoint name, each the part of a parameter that it fills."""
BUFFERS = "buffers"
"""Section of an engine's file: what it computes with beside the weights, by the engine's own names."""
ROTARY = "cos_sin_cache"
"""Last part of the name of a buffer whose rows are cos and sin of the rotary angles of a position, half of the columns each."""


def description_file(run_dir: Path, incarnation: str) -> Path:
    """Where a process of a run describes its tensors; its registration names the file."""
    return run_dir / "shared" / f"{incarnation}{SUFFIX}"
