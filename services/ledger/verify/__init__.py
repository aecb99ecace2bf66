"""Verifies the event log of a run, independently of the code that wrote it."""
