"""Engines whose ranks are processes of their own."""
