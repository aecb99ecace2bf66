"""Generation engines behind one interface, `base.py`."""
