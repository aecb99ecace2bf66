"""Runs engines that decode inside the rollout worker's own process."""
