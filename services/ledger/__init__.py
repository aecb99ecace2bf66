"""Holds the ledger: the state of every group of a run and the staleness bound, in one Redis key space.

Other packages import `interface` (the protocol of every ledger), `redis.ledger` and `redis.url` (the
implementation in use), `memory.ledger` (the oracle), `embedded_server`, `event_log.archiver`,
`event_log.reader`, `event_log.trace` and `verify.verifier`. This module imports none of them, so the
interface is importable without a Redis client.
"""
