"""Runs the processes of tether; the only package that reads settings and connects to the ledger."""
