"""The ledger on Redis or Valkey: one Lua script a transition."""
