"""The servers of Shardwell: shard servers and the coordinator."""
