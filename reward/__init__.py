"""Scores rollouts: verifiers, the worker processes that run them, and the combination of their scores."""
