"""Holds the tools that work on a run from outside: replay and evaluation."""
