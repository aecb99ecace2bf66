"""Names the kinds of layers whose attention the kernels of both backends compute. No torch here."""

KNOWN_TYPES = frozenset({"full_attention", "sliding_attention"})
"""As config.json calls them."""
