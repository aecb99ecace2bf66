"""Checks settings, model, prompts and endpoints of a run before it starts."""
