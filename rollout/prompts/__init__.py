"""Prompt sources, and the order in which prompts are used."""
