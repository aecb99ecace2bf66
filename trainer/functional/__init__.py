"""Holds pure tensor functions: log-probabilities, losses and advantages.

Each docstring states formula, source, shapes, reduction and dtype.
"""
