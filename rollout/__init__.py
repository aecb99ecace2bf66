"""Generation: prompts, environments and engines. Text stops at `render.py`; below it there are only
tokens."""
