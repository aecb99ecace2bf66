"""Publishes weight versions; `registry.py` has the table of transports.

`shm`, `disk` and `http` are `files.py`; `shared` is `shared.py`, on several ranks `shared_parts.py`; `nccl`
is `served/nccl_pairs.py`, `ipc` is `served/ipc_handles.py`, both driven by `served/sender.py`.
"""
