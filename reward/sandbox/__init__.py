"""Runs code from a model in a confined child process."""
