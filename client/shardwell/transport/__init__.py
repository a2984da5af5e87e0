"""Transports: how bytes travel between a trainer and a shard server."""
