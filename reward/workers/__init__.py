"""Runs verifiers in worker processes with a time limit."""
