"""Holds the models of a run beside the one that is trained as a policy, and a step with all of them."""
