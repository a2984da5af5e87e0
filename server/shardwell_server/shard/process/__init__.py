"""The process of a shard server: its command, process groups, registration with the coordinator."""
