"""Loads and validates the settings of a run."""
