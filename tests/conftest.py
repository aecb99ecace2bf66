"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("tether", deadline=None)  # a slow machine is no failure
settings.load_profile("tether")
