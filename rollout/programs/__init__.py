"""Programs of harnesses, run as processes next to the rollout worker."""
