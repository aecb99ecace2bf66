"""Engine that serves the trainer's Megatron model in the worker's process."""
