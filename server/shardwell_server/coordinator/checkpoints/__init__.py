"""Checkpoints of runs: when they are saved, and how runs are created from them or rolled back to them."""
