"""Engine that serves with sglang-jax; models and KV cache live in a process with another interpreter."""
