"""The process of a shard server: its command, its siblings on the host, its place in the cluster."""
