"""The interface of training backends, and what they share."""
