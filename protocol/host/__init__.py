"""Handles files, locks, descriptors and process trees; may import the standard library and psutil."""
