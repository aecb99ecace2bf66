"""Implements what both ends of a weight transfer do on a device; may import torch."""
