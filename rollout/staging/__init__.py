"""Stages a weight version next to an engine's live parameters, and commits it into them."""
