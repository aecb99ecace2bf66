"""Finds silent faults of a run: another party computes a share of it again, and compares."""
