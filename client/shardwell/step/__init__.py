"""The state of a trainer's step, and its commit."""
