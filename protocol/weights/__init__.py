"""Layout, digests and provisional manifests of weight versions: pure functions."""
