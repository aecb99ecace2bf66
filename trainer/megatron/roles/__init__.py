"""Holds the other models on the policy's ranks: the critic and frozen models."""

import trainer.megatron.cpu  # noqa: F401 (before the modules import megatron-core)
