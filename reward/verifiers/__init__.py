"""Verifiers: one module each, with a dataclass `Options` and a pure function `score(prompt_text, response,
metadata, options)`."""
