"""Converts settings of other trainers to settings of tether."""
