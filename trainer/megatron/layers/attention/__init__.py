"""Attention as Megatron's layers have it: with rotation, over the context ranks, with latent keys."""
