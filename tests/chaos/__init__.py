"""Breaks the processes and the network of a real cluster while it trains. ``python -m tests.chaos``."""
