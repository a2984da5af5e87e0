"""The transports of a shard server, except gRPC: sockets and shared memory."""
