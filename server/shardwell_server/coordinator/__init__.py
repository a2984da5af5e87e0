"""The coordinator: assigns ranks and shards, commits steps."""
