"""Holds the other models on the policy's ranks: the critic, and models that are never trained."""
