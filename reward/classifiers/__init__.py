"""Computes the logits of sequence classifiers, by transformers or by an engine."""
