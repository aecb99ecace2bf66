"""Applies conversion rules: plans the pieces of each rank and exports tensors. Knows no family of models."""
