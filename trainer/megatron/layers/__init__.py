"""Layers of the Megatron backend, beyond what `trainer/layers` computes for every backend."""

import trainer.megatron.cpu  # noqa: F401 (before the modules import megatron-core)
