"""One model at a time is built in a process."""

import threading

MODEL_BUILDING = threading.Lock()
"""Held around `from_pretrained` and `from_config`.

transformers replaces methods of its base class while it builds a model (`no_tie_weights`, `no_init_weights`)
and puts back what it found. Two threads at once find each other's replacements: the last one out leaves them
in place, and no model loaded afterwards in that process ties its embeddings.
"""
