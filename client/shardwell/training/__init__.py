"""A trainer's steps: the loop, the step in flight, rejoining."""
