"""From scored rollouts to the batch of a step."""
