"""Parse model answers into the parts that clients receive: thoughts, text and tool calls."""
