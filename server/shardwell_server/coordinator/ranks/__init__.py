"""The trainers of a run, and the logical ranks that they play."""
