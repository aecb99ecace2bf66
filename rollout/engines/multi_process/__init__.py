"""Engines whose ranks run in separate processes."""
