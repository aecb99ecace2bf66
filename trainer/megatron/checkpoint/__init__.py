"""Writes a run's state by rank, and reads it back in that layout or another one.

Files of a directory:
    layout.json               what was trained and in which layout; by rank 0
    rank-00000.safetensors    what rank 0 held of masters and moments, each tensor named by what it is, its
                              parameter and where it begins in the flat parameter; and its random states

Parameters are not written: they are their masters, rounded.
"""
