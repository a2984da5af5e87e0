"""The performance monitor: where the time of each step went, bottlenecks, advice."""
