"""Runs the programs of harnesses as processes next to the rollout worker."""
