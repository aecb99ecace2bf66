"""Runs code that a model wrote in a confined child process."""
