"""Scores with an LLM judge at an OpenAI-style URL."""
