"""Describes families of models: numbers and conversion rules. No torch, so that checks before a run read it."""
