"""Holds the other models on the policy's ranks: the critic, and models that are never trained."""

import trainer.megatron.cpu  # noqa: F401 (before the modules import megatron-core)
