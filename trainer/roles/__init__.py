"""Holds the models of a run: the policy and the models beside it."""
