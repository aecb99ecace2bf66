"""How vLLM's layers hold their weights: plain on a CPU, and what it makes of them after loading."""
