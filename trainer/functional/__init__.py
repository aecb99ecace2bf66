"""Holds pure tensor functions: log-probabilities, losses and advantages.

Formula, source, shapes, reduction and dtype are in each docstring.
"""
