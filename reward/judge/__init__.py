"""Scores by asking a model at an OpenAI-style URL."""
