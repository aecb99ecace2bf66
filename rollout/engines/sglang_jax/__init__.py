"""Serves with sglang-jax: its models and KV cache are in a process with an interpreter of its own."""
