"""Checks from the event log alone that the bound and the lifecycle held."""
