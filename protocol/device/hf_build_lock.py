"""Serializes the construction of transformers models within a process."""

import threading

MODEL_BUILDING = threading.Lock()
"""Held around `from_pretrained` and `from_config`.

transformers replaces methods of its base class while it builds a model (`no_tie_weights`, `no_init_weights`)
and restores what it found. Of two threads at once, each finds the other's replacements; the last one leaves
these in place, and no model loaded later in that process ties its embeddings.
"""
