"""Converts Hugging Face checkpoints to megatron parameters and back, by one table of rules per family."""
