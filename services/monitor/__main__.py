"""Starts `python -m services.monitor`."""

from services.monitor.service import main

main()
