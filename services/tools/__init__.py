"""Holds what `tether` does on its own: init, check, size, replay, eval, samples, status."""
