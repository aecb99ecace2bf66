"""Reads the ends of the logs of a run."""

from pathlib import Path
from typing import Any

from services.observability.printable import printable

FOLDER = "logs"
"""Folder of the run directory with a log of each service."""
MAX_BYTES = 64 << 10
"""Bytes that are read of a log, the last ones."""
MAX_LOGS = 200
"""Names that are offered."""


def read_log(folder: Path, name: str) -> dict[str, Any]:
    """Return the end of a log, by whole lines; a name that is no log's means the newest one.

    Returns:
        `names` of all logs, `name` (empty if there is none) and `text`.
    """
    logs = {path.name: path for path in sorted(folder.glob("*.log"))[:MAX_LOGS] if path.is_file()}
    if not logs:
        return {"names": [], "name": "", "text": ""}
    if name not in logs:
        name = max(logs, key=lambda known: logs[known].stat().st_mtime_ns)
    with logs[name].open("rb") as file:
        skipped = max(0, file.seek(0, 2) - MAX_BYTES)
        file.seek(skipped)
        data = file.read(MAX_BYTES)
    text = data.partition(b"\n")[2] if skipped else data
    return {"names": list(logs), "name": name, "text": printable(text.decode(errors="replace"))}
