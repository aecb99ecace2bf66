"""Reads the directory of a run, while the run is on and after its end."""
