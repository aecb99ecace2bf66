"""Contains the models of a run: the policy and the other models."""
