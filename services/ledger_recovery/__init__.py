"""Archives ledger events, finds out whether a ledger lost acknowledged writes, and rebuilds it."""
