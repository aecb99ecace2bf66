"""Rewards: verifiers, the processes they run in, and how their scores are combined."""
