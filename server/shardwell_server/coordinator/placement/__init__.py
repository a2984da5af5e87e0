"""Declaration of units and their placement on shard servers."""
