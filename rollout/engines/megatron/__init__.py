"""Serves the trainer's Megatron model in the worker's own process."""
