"""Loads a user's algorithm and validates all return values."""
