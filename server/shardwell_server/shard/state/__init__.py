"""State of a shard server: runs, shards, versions, contributions, optimizer partitions."""
