"""Finds silent faults of a run: a second party recomputes a share of it and compares."""
