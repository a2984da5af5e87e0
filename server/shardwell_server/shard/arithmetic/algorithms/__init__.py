"""The optimizers that a shard server can apply."""
