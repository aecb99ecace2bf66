"""Holds the models beside the policy on its ranks: the critic, and those that are never trained."""
