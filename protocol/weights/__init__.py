"""Lays out, digests and describes weight versions: pure functions."""
