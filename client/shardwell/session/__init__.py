"""A trainer's session in a run: joining, the step in flight, units, buffers and leaving."""
