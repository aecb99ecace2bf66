"""Runs engines whose ranks are processes of their own."""
