"""The step RPCs and the two-phase commit of a step."""
