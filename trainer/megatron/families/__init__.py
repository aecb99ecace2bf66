"""Describes families of models: their numbers and conversion rules. No torch: checks before a run read them."""
