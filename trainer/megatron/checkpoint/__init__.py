"""Saves a run's state by rank, and restores it in the same or another layout.

Files of a directory:
    layout.json               trained model and layout; written by rank 0
    rank-00000.safetensors    masters, moments and random states of rank 0; a tensor's name has its kind,
                              parameter and start in the flat parameter

Parameters are not saved, because they are the rounded masters.
"""
