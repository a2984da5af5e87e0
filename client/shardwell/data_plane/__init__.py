"""How bytes travel between this trainer and the shard servers. Knows shards and versions, not modules."""
