"""Implements the FSDP backend: any causal language model of transformers, sharded by torch over its ranks."""
