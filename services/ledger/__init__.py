"""The ledger: every group of a run, within the staleness bound, in one Redis key space."""
