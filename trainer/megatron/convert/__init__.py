"""Hugging Face checkpoints to megatron parameters and back: one table of rules per family, used in both
directions."""
