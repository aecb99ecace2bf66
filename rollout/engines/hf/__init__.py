"""Engine for transformers models; the reference implementation."""
