"""Shows a running service's state: metrics, health, progress and plots."""
