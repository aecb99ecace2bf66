"""Serves versions from the trainer's ranks to engines over connections: transports `nccl` and `ipc`."""
