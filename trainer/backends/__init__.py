"""Defines the interface of training backends, and holds the helpers that they share.

`trainer/registry.py` makes one by name; it stands above because it knows roles, too.
"""
