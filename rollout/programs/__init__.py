"""Runs the programs of harnesses, beside the rollout worker."""
