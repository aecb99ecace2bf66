"""Implements the megatron-core training backend. No other package imports megatron."""

import logging
import warnings

# On import, megatron-core warns once per module and rank that the optional TransformerEngine and Apex are
# missing.
warnings.filterwarnings(
    "ignore", message=".*(Transformer Engine|Apex).*(not installed|Falling back)", category=UserWarning
)
# megatron-core also logs the optional dependencies that it finds.
logging.getLogger("megatron").setLevel(logging.WARNING)
