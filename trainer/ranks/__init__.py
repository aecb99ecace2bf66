"""Starts the trainer's ranks, and passes values between them."""
