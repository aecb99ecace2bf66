"""Implements device operations for both ends of a weight transfer; modules may import torch."""
