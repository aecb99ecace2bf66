"""Runs commands of an episode in a world of its own: six calls, by several providers."""
