"""Shows a running service's state: metrics, health, status."""
