"""What a running service shows: metrics, health, progress and plots."""
