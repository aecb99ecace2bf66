"""Runs `python -m services.ingest`."""

from services.ingest.service import main

main()
