"""Prompt sources: where prompts come from and in which order."""
