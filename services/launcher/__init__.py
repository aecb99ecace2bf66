"""Starts, restarts and scales the processes of a run on one machine."""
