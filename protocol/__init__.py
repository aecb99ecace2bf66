"""Defines the messages that the services exchange, and the rules that both sides of an exchange apply.

Allowed imports:

    protocol.device     torch (and transformers, when a model is built)
    protocol.host       the standard library and psutil
    everything else     the standard library, numpy, msgspec, msgpack and xxhash

No module here imports another package of the project.
"""
