"""Creates optimizers by name, each from a library."""
