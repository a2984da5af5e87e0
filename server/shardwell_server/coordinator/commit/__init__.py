"""The step rpcs and the two-phase commit of a step."""
