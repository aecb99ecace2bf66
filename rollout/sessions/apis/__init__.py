"""APIs that clients may speak besides chat and completions: each reads requests and writes answers."""
