"""Scores responses; one module per verifier.

Each module has a dataclass `Options` and a pure function `score(prompt_text, response, metadata, options)`.
"""
