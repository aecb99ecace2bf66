"""Serves a model to clients of the OpenAI API, without a run."""
