"""Plans a step for its device's memory, and retries a step that ran out of memory."""
