"""Runs code of a model in a confined child process."""
