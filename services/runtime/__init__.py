"""Runs a service process: start, registration, waits, drain and exit code."""
