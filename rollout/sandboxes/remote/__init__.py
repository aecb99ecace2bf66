"""Sandboxes on machines of cloud providers, with the provider's own client."""
