"""Attention of megatron's layers: with rotation, context parallelism, and latent keys."""
