"""Loads and checks the settings of a run."""
