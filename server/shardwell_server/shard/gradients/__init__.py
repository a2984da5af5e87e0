"""The gradient of the step in flight of a shard: contributions and their mean."""
