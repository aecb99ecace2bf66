"""Runs `python -m services.rollout`."""

from services.rollout.service import main

main()
