"""Checks whether the backend `megatron` computes with a checkpoint as Hugging Face's model does."""
