"""Serves versions that stay on the trainer's ranks to engines over connections: `nccl` and `ipc`."""
