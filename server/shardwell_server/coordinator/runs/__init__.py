"""State machine of a run: its members, ranks, units and the step in flight. No I/O."""
