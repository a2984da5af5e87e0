"""The shard server: stores shards of units with their optimizer state."""
