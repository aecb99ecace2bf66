"""Runs a service process: start, registration, waits, drain, exit code."""
