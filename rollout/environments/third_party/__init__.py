"""Adapters for environments of other projects."""
