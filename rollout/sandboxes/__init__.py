"""Sandboxes for an episode's commands: six operations, implemented by several providers."""
