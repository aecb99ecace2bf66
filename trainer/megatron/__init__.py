"""Implements the megatron-core training backend; the only package that imports megatron."""

import logging
import warnings

import torch

# megatron-core warns on import, once per module and rank, that TransformerEngine and Apex are missing. They
# are optional here.
warnings.filterwarnings(
    "ignore", message=".*(Transformer Engine|Apex).*(not installed|Falling back)", category=UserWarning
)
# On a CPU it recommends a variable of CUDA, on each rank.
if not torch.cuda.is_available():
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
# It also logs which of its optional parts it found.
logging.getLogger("megatron").setLevel(logging.WARNING)
