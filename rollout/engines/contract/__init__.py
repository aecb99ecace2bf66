"""Tests for any engine: pytest runs a subclass of `EngineContract` with a fixture `bench`."""
