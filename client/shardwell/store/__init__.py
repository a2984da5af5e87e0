"""The trainer's side of the shard servers: gathers and pushes of units, buffers, moves."""
