"""Reads from the directory of a run what happened in it, while it is on and afterwards."""
