"""The versions of the values of a shard, plain and encoded."""
