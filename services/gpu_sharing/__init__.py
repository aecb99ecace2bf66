"""Time-slices GPUs between the trainer and the engines."""
