"""Runs generation engines behind one interface, `base.Engine`."""
