"""How vLLM's layers hold their weights: plain on a CPU, or processed after loading."""
