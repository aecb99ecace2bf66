"""Engines that decode in the rollout worker's process."""
