"""Describes families of models: numbers and conversion rules.

Does not import torch, for checks before a run.
"""
