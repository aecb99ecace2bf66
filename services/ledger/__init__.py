"""Holds the ledger: every group of a run, within the staleness bound, in one Redis key space.

Other packages import `interface` (the protocol of every ledger), `redis.ledger` and `redis.url` (the one in
use), `memory.ledger` (the oracle), `embedded_server`, `event_log.archiver`, `event_log.reader` and
`event_log.trace` (the event log), and `verify.verifier`. This module imports none of them: an importer of the
interface needs no Redis client.
"""
