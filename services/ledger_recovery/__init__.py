"""Archives ledger events, detects a ledger that lost acknowledged writes, and rebuilds it."""
