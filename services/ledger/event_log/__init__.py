"""The event log of a run: written by the ledger, archived by the ingest, read by people."""
