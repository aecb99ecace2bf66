"""Writes TensorBoard event files, with TensorBoard's own writer."""

import json
import time
from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.tracking.base import TrackedPoint, TrackerOptions


class TensorboardTracker:
    """Directory of event files; each start of the run adds a file."""

    def __init__(self, options: TrackerOptions) -> None:
        """Open a new file; points of versions that may be repeated become invalid."""
        self.run_id = options.run_id or options.name
        self.url = f"tensorboard --logdir {options.directory}"
        self._writer = EventFileWriter(str(options.directory))
        self._last = -1
        if options.next_version is None:
            self._add(0, time.time(), _text("settings", json.dumps(dict(options.settings), indent=2)))
        else:
            self._void_from(options.next_version)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Write and flush points."""
        for point in points:
            if point.version < self._last and any(name.startswith("train/") for name in point.numbers):
                self._void_from(point.version)
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.numbers.items()]
            self._add(point.version, point.time, *values)
            self._last = max(self._last, point.version)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, seconds: float, *values: Summary.Value) -> None:
        self._writer.add_event(Event(step=step, wall_time=seconds, summary=Summary(value=values)))

    def _void_from(self, version: int) -> None:
        """Invalidate the written points from `version` on, because the versions are repeated."""
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=version, wall_time=time.time(), session_log=start))
        self._last = version - 1


def _text(tag: str, text: str) -> Summary.Value:
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[f"```\n{text}\n```".encode()])
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
