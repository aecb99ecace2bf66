"""Applies conversion rules: plans the pieces of each rank and exports tensors.

Independent of model families.
"""
