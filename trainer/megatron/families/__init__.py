"""Describes families of models: numbers and conversion rules. No torch: checks before a run read it."""
