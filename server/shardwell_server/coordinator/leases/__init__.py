"""Leases: joining, expiry, revocation and fencing of trainers; registration and probing of shard servers."""
