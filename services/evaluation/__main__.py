"""Runs `python -m services.evaluation`."""

from services.evaluation.service import main

main()
