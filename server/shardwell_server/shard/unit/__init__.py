"""One shard of a unit on this server: values, gradient, optimizer and state, in memory."""
