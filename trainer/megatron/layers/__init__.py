"""Layers of the megatron backend that `trainer/layers` does not provide for all backends."""

import trainer.megatron.cpu  # noqa: F401 (before the modules import megatron-core)
