"""Generates with the training model, using a paged KV cache."""

import trainer.megatron.cpu  # noqa: F401 (before the modules import megatron-core)
