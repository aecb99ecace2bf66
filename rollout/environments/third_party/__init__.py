"""Plays environments that other projects define."""
