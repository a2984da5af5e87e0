"""Child processes that the SDK starts: the servers of a local cluster, and the trainers of ``shardwell launch``."""
