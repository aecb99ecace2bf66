"""Defines, archives and reads the event log of a run, which the ledger writes."""
