"""Generates samples: prompts, environments and engines. Only `render.py` converts between text and tokens."""
