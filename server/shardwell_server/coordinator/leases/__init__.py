"""Leases: joining, expiry and revocation of trainers; work items; registration and probing of shard servers."""
