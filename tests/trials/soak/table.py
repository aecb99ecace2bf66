"""Renders the soak's JSON as Markdown tables."""

from collections.abc import Mapping, Sequence
from typing import Any


def render(found: Mapping[str, Any]) -> str:
    """Return what `make soak` prints and results/soak.md shows."""
    return (
        "\n\n".join(
            [
                _run(found),
                _processes(found),
                *([_costs(found), _projection(found)] if "costs" in found else []),
            ]
        )
        + "\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _run(found: Mapping[str, Any]) -> str:
    groups, keys = (
        [found["groups"][name] for name in ("issued", "trained", "dropped", "handed_back")],
        found["ledger_keys"],
    )
    rows = [
        ("rollout workers / reward workers", f"{found['rollouts']} / {found['rewards']}"),
        ("seconds, of which judged", f"{found['seconds']:.0f}, {found['settled_s']:.0f}"),
        (
            "groups issued = trained + dropped + handed back",
            " ".join(map(str, groups)),
        ),
        ("groups/s, steps/s", f"{found['groups_per_s']}, {found['steps_per_s']}"),
        ("largest trained lag", found["max_lag"]),
        ("ledger scripts/s", found["ledger_calls_per_s"].get("evalsha", 0)),
        ("keys in the ledger, fewest and most", f"{keys[0]}, {keys[1]}"),
        ("memory of the ledger, MB", f"{found['ledger_mb'][0]} to {found['ledger_mb'][1]}"),
        ("bytes per group record, its indexes included", found["ledger_bytes_per_group"]),
        ("group records held", "{} to {}".format(*found["ledger_sizes"]["groups"])),
        ("verdict", "ok" if found["ok"] else "; ".join(found["failures"])),
    ]
    return _table(("", "value"), rows)


def _processes(found: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            found["rss_mb"][name],
            found["rss_slope_mb_per_min"][name],
            found["cores"][name],
            found["zmq_thread_cores"].get(name, 0.0),
        )
        for name in found["rss_mb"]
    ]
    return _table(("process", "MB at the end", "MB/min", "cores", "of which ZeroMQ's threads"), rows)


def _costs(found: Mapping[str, Any]) -> str:
    ledger = found["costs"]["measured"]["ledger"]
    sizes = list(ledger)
    rows = [(name, *(ledger[size][name] for size in sizes)) for name in ledger[sizes[0]]]
    for name in ("version", "heartbeat", "window"):
        values = found["costs"]["measured"][name]
        rows.append((f"bus: {name} (at {', '.join(map(str, values))})", *values.values()))
    return _table(
        ("microseconds of CPU", *(f"{size} processes, engines, active groups" for size in sizes)), rows
    )


def _projection(found: Mapping[str, Any]) -> str:
    loads = found["costs"]["projection"]
    parts = list(next(iter(loads.values()))["cores"])
    rows: list[Sequence[object]] = [
        (part, *(load["cores"][part] for load in loads.values())) for part in parts
    ]
    limits = (
        f"{load['first']}, at {load['workers']} workers = {load['groups_per_s']} groups/s"
        for load in loads.values()
    )
    rows.append(("saturates first", *limits))
    return _table(("cores at 10,000 workers", *(f"each makes {name}" for name in loads)), rows)
