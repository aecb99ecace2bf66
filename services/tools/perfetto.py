"""Writes a run's trace as a file of the Trace Event Format, which ui.perfetto.dev opens."""

from pathlib import Path

import msgspec

from protocol.host.atomic_file import written_aside
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import read_events
from services.run_record.steps import FILE as METRICS
from services.run_record.steps import read_steps
from services.tracking.trace_records import trace_records


def write_perfetto(run_dir: Path, out: Path) -> int:
    """Write the trace of a run, and return how many records it has.

    Raises:
        SettingsError: there is no event log, or a line of it is not an event.
        OSError: `out` cannot be written.
    """
    count = 0
    with written_aside(out) as aside, aside.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for record in trace_records(read_events(run_dir / FILE), read_steps(run_dir / METRICS)):
            file.write((b",\n" if count else b"") + msgspec.json.encode(record))
            count += 1
        file.write(b"\n]}\n")
    return count
