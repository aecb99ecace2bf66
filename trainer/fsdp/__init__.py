"""Implements the FSDP backend: causal language models of transformers, sharded over the ranks by torch."""
