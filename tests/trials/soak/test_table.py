"""The tables of a report, with and without the costs."""

from typing import Any

from tests.trials.soak.table import render

FOUND: dict[str, Any] = {
    "ok": False, "failures": ["ingest: memory grows by 2.00 MB/min"], "rollouts": 20, "rewards": 2,
    "seconds": 60.0, "settled_s": 40.0,
    "groups": {"issued": 10, "trained": 7, "dropped": 1, "handed_back": 2}, "groups_per_s": 1.5,
    "steps_per_s": 0.2, "max_lag": 1,
    "ledger_calls_per_s": {"evalsha": 12.0}, "ledger_keys": [20, 22], "ledger_mb": [1.0, 2.0],
    "ledger_bytes_per_group": 300,
    "ledger_sizes": {"groups": [3, 9]}, "rss_mb": {"ingest": 80.0}, "rss_slope_mb_per_min": {"ingest": 2.0},
    "cores": {"ingest": 0.1},
    "zmq_thread_cores": {},
}  # fmt: skip
COSTS = {
    "measured": {"ledger": {"10": {"head": 1.0}, "1000": {"head": 2.0}}, "version": {"10": 3.0},
        "heartbeat": {"10": 4.0}, "window": {"10": 5.0}},
    "projection": {
        "a group a second": {"cores": {"ingest": 2.0}, "first": "ingest", "workers": 500, "groups_per_s": 500}
    },
}  # fmt: skip


def test_tables_show_verdict_costs_and_projection() -> None:
    plain = render(FOUND)
    assert "| groups issued = trained + dropped + handed back | 10 7 1 2 |" in plain
    assert "memory grows by 2.00 MB/min" in plain
    assert "| ingest | 80.0 | 2.0 | 0.1 | 0.0 |" in plain
    full = render(FOUND | {"costs": COSTS})
    assert full.startswith(plain.rstrip("\n"))
    assert "| head | 1.0 | 2.0 |" in full
    assert "ingest, at 500 workers = 500 groups/s" in full
