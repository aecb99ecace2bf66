"""Holds the ledger: every group of a run, within the staleness bound, in one Redis key space.

Other packages import `interface` (what every ledger does), `redis.ledger` and `redis.url` (the one in use),
`memory.ledger` (the oracle), `embedded_server`, `event_log.archiver`, `event_log.reader` and
`event_log.trace` (the event log), and `verify.verifier`. Nothing is imported here: an importer of the
interface needs no Redis client.
"""
