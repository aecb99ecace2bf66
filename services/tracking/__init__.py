"""Sends the numbers of a run to tracking libraries, in processes that the run does not depend on."""
