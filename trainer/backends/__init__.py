"""Defines the interface of training backends, and contains their shared helpers.

`trainer/registry.py` creates backends by name; it is outside this package because it depends on roles, too.
"""
