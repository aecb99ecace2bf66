"""Further client APIs besides chat and completions: each parses requests and formats answers."""
