"""Publishes weight versions. `registry.py` contains the table of transports.

`shm`, `disk` and `http` are in `files.py`; `shared` is in `shared.py`, for several ranks in
`shared_parts.py`; `nccl` is in `served/nccl_pairs.py` and `ipc` in `served/ipc_handles.py`, both driven by
`served/sender.py`.
"""
