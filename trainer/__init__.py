"""Trains models: batches, losses, algorithms, backends, checkpoints, the spool, and senders of weights."""
