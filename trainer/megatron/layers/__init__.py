"""Layers of the Megatron backend, beyond what `trainer/layers` computes for every backend."""
