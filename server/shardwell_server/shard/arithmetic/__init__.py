"""What is done with numbers: sums in rank order, norms, optimizers, averages, random values. Knows no requests."""
