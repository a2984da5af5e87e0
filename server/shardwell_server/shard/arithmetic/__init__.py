"""Arithmetic on tensors: sums in rank order, norms, optimizers, averages and random values."""
