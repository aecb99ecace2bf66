"""Receivers of weight versions; `registry.py` has the table of transports.

`shm`, `disk` and `http` are in `files.py`, `shared` in `shared.py`. `nccl` (`nccl_pairs.py`) and `ipc`
(`ipc_handles.py`) are driven by `part_receiver.py`.
"""
