"""Implements commands of `tether` that need no services: init, check, size, replay, eval, samples, status."""
