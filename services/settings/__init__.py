"""Settings of a run: sections, sources, checks."""
