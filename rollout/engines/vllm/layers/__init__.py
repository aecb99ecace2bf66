"""Weight layouts of vLLM's layers: plain on CPU, or processed after loading."""
