"""The receiving side of weight transports, one file each."""
