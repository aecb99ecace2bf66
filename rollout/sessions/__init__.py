"""Sessions: a harness talks to a URL, and each sample records the calls that it made."""
