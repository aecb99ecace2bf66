"""Runs the processes of tether; the only package that reads settings and connects to the ledger."""

from services.runtime.import_path import protect_imports

protect_imports()
