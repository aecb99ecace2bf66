"""Starts the trainer."""

from services.trainer.service import main

main()
