"""Defines, archives and reads the event log that the ledger writes for a run."""
