"""What the layers of the training model compute beside megatron's parallel linear layers."""
