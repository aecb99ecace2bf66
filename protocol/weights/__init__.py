"""Lays out, digests and describes weight versions with pure functions."""
