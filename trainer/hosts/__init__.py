"""Runs one trainer on several hosts: which host this is, and how the hosts meet and end together."""
