"""Tools that a model calls in plain text: a fenced block in its turn, answered by another block."""
