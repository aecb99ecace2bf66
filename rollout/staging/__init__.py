"""How a weight version gets beside the live parameters of an engine, and into them."""
