"""Generation engines behind one interface, `base.Engine`."""
