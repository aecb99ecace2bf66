"""Publishes weight versions: one module per transport, found by name through `registry.make_sender`."""
