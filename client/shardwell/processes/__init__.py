"""Processes that the SDK starts: a private cluster, and the trainers of ``shardwell launch``."""
