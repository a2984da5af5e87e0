"""What a server holds: runs, shards, versions, contributions."""
