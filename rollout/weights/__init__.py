"""Receives weight versions; `registry.py` has the table of transports.

`shm`, `disk` and `http` are `files.py`; `shared` is `shared.py`; `nccl` is `nccl_pairs.py`, `ipc` is
`ipc_handles.py`, both driven by `part_receiver.py`.
"""
