"""Sums in rank order, norms, optimizers, averages and random values. Knows no requests."""
