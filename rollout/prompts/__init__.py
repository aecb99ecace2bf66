"""Provides prompts: where they come from, and the order in which they are used."""
