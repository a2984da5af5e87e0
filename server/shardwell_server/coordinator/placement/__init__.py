"""Placement of units on shard servers."""
