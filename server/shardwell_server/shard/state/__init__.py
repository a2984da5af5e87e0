"""State of a shard server: its runs with their shards, and those that a former process left."""
