"""Checks a run before anything of it starts: settings, model, prompts, endpoints."""
