"""The coordinator: assigns ranks and shards, and commits steps."""
