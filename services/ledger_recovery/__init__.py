"""Archives ledger events and rebuilds a ledger that lost acknowledged writes."""
