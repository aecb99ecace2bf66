"""Answers of the model as clients get them: thoughts, text and calls of tools."""
