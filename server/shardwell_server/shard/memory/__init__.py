"""Memory of a shard server: budget, buffers, files that trainers map."""
