"""Handles files, locks, descriptors and process trees; imports only the standard library and psutil."""
