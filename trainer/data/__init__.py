"""Builds the batch of a step from scored rollouts."""
