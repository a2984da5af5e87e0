"""The rpcs of a step and its two-phase commit."""
