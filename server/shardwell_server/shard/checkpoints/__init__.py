"""Checkpoints on a shard server: its shards are written in the background, and loaded."""
