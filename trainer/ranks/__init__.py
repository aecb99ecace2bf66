"""Starts the trainer's ranks, and exchanges values between ranks."""
