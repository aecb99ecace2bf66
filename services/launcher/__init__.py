"""Starts the services of a run on one machine and keeps them running."""
