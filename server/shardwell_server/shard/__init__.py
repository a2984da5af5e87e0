"""The shard server: holds shards of units with their optimizer state."""
