"""The shard servers as the coordinator sees and calls them."""
