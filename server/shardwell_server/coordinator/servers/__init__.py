"""The shard servers: their registry, and calls to them."""
