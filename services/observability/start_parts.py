"""Reports the duration of a run's start by part, after its first step."""

from collections.abc import Iterable, Mapping

from services.ledger.interface import Peer

READY = "ready_s"
"""Registry entry: part of a process, such as its engine -> seconds from the process's start until it was
ready."""


def describe_start(peers: Iterable[Peer], prepared_s: float, first_step_s: float) -> str:
    """Return one line: the durations of preparation, of each process's start, and of the first step.

    Args:
        peers: processes of the run, which start concurrently.
        prepared_s: seconds until the first process was started.
        first_step_s: seconds until the first step was seen.
    """
    ready = {
        f"{peer.info.get('name', peer.role)} ({part})": seconds
        for peer in peers
        for part, seconds in _parts(peer.info).items()
    }
    parts = [f"preparation {prepared_s:.1f} s"]
    parts += [f"{name} {seconds:.1f} s" for name, seconds in sorted(ready.items(), key=lambda item: item[1])]
    last = prepared_s + max(ready.values(), default=0.0)
    parts.append(f"then the first step {max(0.0, first_step_s - last):.1f} s")
    return f"started in {first_step_s:.1f} s: {', '.join(parts)}"


def _parts(info: Mapping[str, object]) -> dict[str, float]:
    found = info.get(READY)
    if not isinstance(found, Mapping):
        return {}
    return {str(part): float(seconds) for part, seconds in found.items() if isinstance(seconds, (int, float))}
