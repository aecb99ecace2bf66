"""Brings a weight version beside the live parameters of an engine, and commits it into them."""
