"""Scores in worker processes with a time limit."""
