"""Sends the metrics of a run to tracking libraries, in processes on which the run does not depend."""
