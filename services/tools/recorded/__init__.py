"""Reads and compares runs as their directories record them."""
