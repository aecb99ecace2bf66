"""Plans a step for the memory of its device, and repeats one that ran out of it."""
