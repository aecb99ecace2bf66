"""Implements the megatron-core training backend; the only package that imports megatron."""

import logging
import warnings

# megatron-core warns on import, once per module and rank, that TransformerEngine and Apex are missing. They
# are optional here.
warnings.filterwarnings(
    "ignore", message=".*(Transformer Engine|Apex).*(not installed|Falling back)", category=UserWarning
)
# It also logs which of its optional parts it found.
logging.getLogger("megatron").setLevel(logging.WARNING)
