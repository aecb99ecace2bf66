"""Serves a read-only web page of a run, and reads for it what the run has left on disk."""
