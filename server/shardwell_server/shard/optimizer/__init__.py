"""The optimizer's state of a shard, on the server or on trainers."""
