"""Handles addresses, certificates and listeners of HTTP servers."""
