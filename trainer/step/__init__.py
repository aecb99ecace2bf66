"""Plans a step, makes its updates, and measures it."""
