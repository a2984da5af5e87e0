"""A trainer's membership in its run: admission, heartbeats, epochs."""
