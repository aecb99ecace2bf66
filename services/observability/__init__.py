"""Shows what a running service does: metrics, health, progress and plots."""
