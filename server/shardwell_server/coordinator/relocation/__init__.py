"""Shards that change their servers: loss of a primary, backups, and planned moves."""
