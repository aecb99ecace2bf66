"""Staging of weight versions next to an engine's live parameters, and the commit into them."""
