"""Computations of layers: packed attention and output layer, for `megatron` and `fsdp`, and FP8."""
