"""Optimizers of sharded parameters, which run on the shard servers or on the trainers."""
