"""Sessions: a harness calls the model at a URL, and the calls are recorded as a sample."""
