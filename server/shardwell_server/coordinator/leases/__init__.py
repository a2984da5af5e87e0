"""Leases of trainers and shard servers."""
