"""Starts `python -m services.tracking`."""

from services.tracking.service import main

main()
