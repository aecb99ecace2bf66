"""What both ends of a weight transfer do on a device; the only part of `protocol` that imports torch."""
