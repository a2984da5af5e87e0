"""The arithmetic of each optimizer."""
