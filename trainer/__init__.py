"""Trains models: batches, losses, algorithms, backends, checkpoints, the spool and weight senders."""
