"""Checks that the backend `megatron` computes a checkpoint like Hugging Face's model."""
