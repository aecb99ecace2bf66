"""Implements the ledger on Redis or Valkey: one Lua script per transition."""
