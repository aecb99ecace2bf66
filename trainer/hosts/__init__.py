"""Runs one trainer on several hosts: identifies this host, and coordinates start and end of all hosts."""
