"""What a shard server does for each request, independent of the transport."""
