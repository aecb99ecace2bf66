"""Implements the ledger in memory: the oracle that the Lua scripts are compared with."""
