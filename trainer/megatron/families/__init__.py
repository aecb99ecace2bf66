"""Reads what model a checkpoint holds: plain numbers, no torch, so that checks before a run read it, too."""
