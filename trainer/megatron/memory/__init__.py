"""Holds what decides how much memory a rank takes: recompute, the optimizer's place, budgets."""
