"""Ways for bytes beside the rpcs."""
