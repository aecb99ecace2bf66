"""Plans a step, runs its updates and measures the step."""
