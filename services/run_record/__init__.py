"""Reads the directory of a run, during the run and after its end."""
