"""What the trainer keeps on disk: spool, archive, checkpoints."""
