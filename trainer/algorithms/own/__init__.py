"""Loads an algorithm of the user, and checks all that it returns."""
