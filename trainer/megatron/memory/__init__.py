"""Computes and controls the memory of a rank: recomputation, optimizer offload, budgets."""
