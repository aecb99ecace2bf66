"""Training: batches, losses, algorithms, backends, checkpoints, the spool, and the sending side of weight
transports."""
